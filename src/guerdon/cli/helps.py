"""What `--help` says of each command: its examples, which come before the flags, and notes, which come after them."""

EXAMPLES = """\
Serves reward models and critics that train, and scores with them.

examples:
  # serve a folder as transformers saves it, on port 5555
  guerdon serve ./my-reward-model
  # score a file with it
  guerdon score --server http://127.0.0.1:5555 in.jsonl -o out.jsonl
  # see whether all is well here, and there
  guerdon doctor http://127.0.0.1:5555
  # train a policy against it
  guerdon reinforce run.yaml
"""

NOTES = """\
`guerdon COMMAND --help` has each command's examples. Exit status: 0 done, 1 something failed, 2 cannot start, and a
few more: see docs/cli.md. NO_COLOR=1 turns colours off.
"""

SERVE_EXAMPLES = """\
Serves reward models over HTTP and gRPC until SIGTERM or Ctrl-C.

examples:
  # a folder as transformers saves it, on port 5555
  guerdon serve ./my-reward-model
  # a model of the Hugging Face hub
  guerdon serve some-org/reward-model --dtype bfloat16
  # your own function, in my_module.py
  guerdon serve my_module:my_function
  # several models and a sum of them, as below
  guerdon serve --config server.yaml
  # one model over two GPUs
  torchrun --nproc-per-node 2 -m guerdon serve MODEL --tensor-parallel 2
"""

SERVE_NOTES = """\
A YAML file has the same settings; flags go before it:

  port: 5555
  models:
    - {model: ./helpful, name: helpful, dtype: bfloat16}
    - {model: ./safe, name: safe, max_length: 4096}
    - {model: "my_module:brevity", name: brevity}
  rewards:         # a weighted sum; it is for clients that name no model
    - name: reward_model
      components:
        - {model: helpful, normalize: given, mean: 1.2, std: 3.0}
        - {model: safe, weight: 0.5, normalize: running, clip: 5}
        - {model: brevity, weight: 0.1}

A function has a first parameter `texts`, `responses` or `tokens`, and may have `prompts` and `labels`, which clients
send beside the samples. With `normalize: running` a reward depends on what was scored before it; guerdon_component_mean
and guerdon_component_std under /metrics tell what to give for the same rewards every time.
"""

CRITIC_EXAMPLES = """\
Serves a critic that trains, over HTTP and gRPC, until SIGTERM or Ctrl-C.

examples:
  # a critic made of a reward model, on port 5556
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic
  # one that answers with rewards beside its values
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic \\
      --reward-model ./my-reward-model
  # settings from a file, as below
  guerdon serve-critic --config critic.yaml
"""

CRITIC_NOTES = """\
MODEL is any checkpoint of a decoder that `guerdon serve` loads; a reward model's head becomes the value head. Clients
find models named critic_infer, critic_train, critic_validate, critic_save, critic_load, critic_offload, critic_onload
and critic_state, and a Python client is guerdon.CriticClient.

With --checkpoint-dir a train request that was answered survives the server: the same command again loads the newest
checkpoint and applies what came after it. A YAML file has the same settings; flags go before it:

  port: 5556
  critic:
    model: ./my-reward-model
    checkpoint_dir: ./critic
    global_batch_size: 64
    learning_rate: 9e-6
"""

SCORE_EXAMPLES = """\
Scores a JSONL file, through servers that run or by a model that is loaded here.

examples:
  guerdon score --server http://127.0.0.1:5555 in.jsonl -o out.jsonl
  # over two servers that share the load, compressed input
  guerdon score --server http://a:5555 --server grpc://b:5557 \\
      in.jsonl.gz -o out.jsonl
  # without a server
  guerdon score --model ./my-reward-model in.jsonl -o out.jsonl
  # from a pipe into a pipe
  head in.jsonl | guerdon score --server http://a:5555 - -o - > out.jsonl
"""

SCORE_NOTES = """\
Each line of IN is one of {"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"}, {"messages"},
{"text"}; a name in .gz is read compressed. OUT gets the same lines with "rewards" added, in the same order. The same
command again continues where it stopped, with the same weights. A sample that fails has null for its reward, "errors"
says why, and the exit status is 1. A function that scores may read a line's "prompt", and its "label", any JSON value.

--name goes with --server, too; all other settings of a model go only with --model. A server's key is read from
GUERDON_API_KEY.
"""

REINFORCE_EXAMPLES = """\
Trains a policy by REINFORCE, RLOO or GRPO against a served reward model.

examples:
  # in another terminal
  guerdon serve ./my-reward-model
  # settings from a file, as below, one of them by its flag
  guerdon reinforce run.yaml --rollouts.temperature 0.9
  # the policy sharded over four GPUs
  torchrun --nproc-per-node 4 -m guerdon reinforce run.yaml --parallel.fsdp
"""

REINFORCE_NOTES = """\
CONFIG.yaml has the settings in sections; flags go before it:

  policy: {model: ./my-policy, learning_rate: 1e-6}
  data: {prompts: prompts.jsonl}
  rollouts: {rollouts_per_prompt: 8, max_new_tokens: 256}
  reinforce: {advantage_estimator: rloo, kl_coefficient: 0.01}
  remote_rm: {reward_model: {ip: 127.0.0.1, port: 5555}}
  run: {steps: 200, output_dir: out/run}

The same command again goes on from the newest checkpoint in run.output_dir. Metrics, curves, samples and the policy lie
there; each checkpoint's policy is a model that transformers loads.
"""

PPO_EXAMPLES = """\
Trains a policy by PPO against a served critic.

examples:
  # in another terminal
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic \\
      --reward-model ./my-reward-model
  # settings from a file, as below, one of them by its flag
  guerdon ppo run.yaml --run.steps 500
"""

PPO_NOTES = """\
CONFIG.yaml has the settings in sections; flags go before it:

  policy: {model: ./my-policy, learning_rate: 1e-6}
  data: {prompts: prompts.jsonl}
  rollouts: {rollouts_per_prompt: 1, max_new_tokens: 256}
  ppo: {kl_coefficient: 0.01, critic_warmup_steps: 5}
  remote_critic_rm:
    critic: {ip: 127.0.0.1, port: 5556}
    combine_rm_and_critic_server: true
  run: {steps: 200, output_dir: out/run}

Checkpoints of policy and critic are saved as a pair, and the same command again goes on from the newest pair.
"""

BENCH_EXAMPLES = """\
Measures a server under the load of an RLHF trainer: prompts with several responses each.

examples:
  # as many requests as it takes, for half a minute
  guerdon bench http://127.0.0.1:5555 --seconds 30
  # a given load, figures for a program, a picture
  guerdon bench http://127.0.0.1:5555 --data in.jsonl \\
      --json bench.json --plot bench.png
  # fail, as in CI, where the 99th percentile is above 200 ms
  guerdon bench http://127.0.0.1:5555 --requests 500 --fail-p99-ms 200
"""

DOCTOR_EXAMPLES = """\
Says what is installed, what the machine has, what a server answers, and what to do about it.

examples:
  guerdon doctor
  # a server, too
  guerdon doctor http://127.0.0.1:5555
  # for a program; the exit status is 1 where there is a problem
  guerdon doctor --json
"""

COMPLETION_EXAMPLES = """\
Prints a script that completes the command's words in a shell.

examples:
  # bash, now and in every later shell
  source <(guerdon completion bash)
  echo 'source <(guerdon completion bash)' >> ~/.bashrc
  # zsh, after compinit; ~/.zfunc must stand in fpath
  guerdon completion zsh > ~/.zfunc/_guerdon
  # fish
  guerdon completion fish > ~/.config/fish/completions/guerdon.fish
  # tcsh
  guerdon completion tcsh > ~/.guerdon.tcsh; source ~/.guerdon.tcsh
"""
