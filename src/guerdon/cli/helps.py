"""The texts of `--help` for each command: examples before the flags, and notes after them."""

EXAMPLES = """\
Serve models for RL trainers: reward models, critics, teachers, judges.

examples:
  # serve a model that transformers saved, on port 5555
  guerdon serve ./my-reward-model
  # score a file with it
  guerdon score --server http://127.0.0.1:5555 in.jsonl -o out.jsonl
  # check this machine and the server
  guerdon doctor http://127.0.0.1:5555
  # train a policy against it
  guerdon reinforce run.yaml
"""

NOTES = """\
`guerdon COMMAND --help` shows each command's examples. Exit status: 0 done, 1 failed, 2 cannot start; docs/cli.md
lists the others. NO_COLOR=1 turns colours off.
"""

SERVE_EXAMPLES = """\
Serve reward models over HTTP and gRPC until SIGTERM or Ctrl-C.

examples:
  # a model that transformers saved, on port 5555
  guerdon serve ./my-reward-model
  # a model of the Hugging Face hub
  guerdon serve some-org/reward-model --dtype bfloat16
  # your own function in my_module.py
  guerdon serve my_module:my_function
  # several models and a sum of them, as below
  guerdon serve --config server.yaml
  # one model split over two GPUs, four times: eight GPUs behind one port
  guerdon serve ./my-reward-model --tensor-parallel 2 --data-parallel 4
"""

SERVE_NOTES = """\
A YAML file has the same settings; flags override it:

  port: 5555
  models:
    - {model: ./helpful, name: helpful, dtype: bfloat16}
    - {model: ./safe, name: safe, max_length: 4096}
    - {model: "my_scorer:shortness", name: short}
  rewards:         # a weighted sum, for clients that name no model
    - name: reward_model
      components:
        - {model: helpful, normalize: given, mean: 1.2, std: 3.0}
        - {model: safe, weight: 0.5, normalize: running, clip: 5}
        - {model: short, weight: 0.1}

The first parameter of a function is `texts`, `responses` or `tokens`; it may also have `prompts` and `labels`, which
clients send with the samples. With `normalize: running`, a reward depends on what was scored before it. For rewards
that do not, use `normalize: given` with the mean and std that /metrics reports as guerdon_component_mean and
guerdon_component_std.
"""

CRITIC_EXAMPLES = """\
Serve a critic that trains, over HTTP and gRPC, until SIGTERM or Ctrl-C.

examples:
  # a critic initialised from a reward model, on port 5556
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic
  # one that returns rewards beside its values
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic \\
      --reward-model ./my-reward-model
  # trained weights and optimiser sharded over all GPUs
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic --fsdp
  # settings from a file, as below
  guerdon serve-critic --config critic.yaml
"""

CRITIC_NOTES = """\
MODEL is any decoder checkpoint that `guerdon serve` loads; a reward model's head becomes the value head. Clients find
the models critic_infer, critic_train, critic_validate, critic_save, critic_load, critic_offload, critic_onload and
critic_state; guerdon.CriticClient is a client in Python.

With --checkpoint-dir, acknowledged train requests survive a crash: the same command loads the newest checkpoint and
replays the later requests from the journal. A YAML file has the same settings; flags override it:

  port: 5556
  critic:
    model: ./my-reward-model
    checkpoint_dir: ./critic
    global_batch_size: 64
    learning_rate: 9e-6
"""

TEACHER_EXAMPLES = """\
Serve log-probs of a frozen language model, over HTTP and gRPC, until SIGTERM or Ctrl-C.

examples:
  # a teacher or reference, on port 5555
  guerdon serve-teacher ./my-model
  # beside other models
  guerdon serve-teacher ./my-model --name reference --port 5600
  # several models, as below
  guerdon serve-teacher --config teachers.yaml
"""

TEACHER_NOTES = """\
MODEL is any causal language model that transformers loads; it needs no reward head. A server may have several teachers,
and reward models beside them:

  models:
    - {kind: teacher, name: teacher, model: ./qwen-14b, dtype: bfloat16}
    - {kind: teacher, name: reference, model: ./sft}
    - {name: reward_model, model: ./my-reward-model}
"""

JUDGE_EXAMPLES = """\
Serve a frozen language model's rewards by a rubric, one token per criterion, until SIGTERM or Ctrl-C.

examples:
  # a judge on port 5555
  guerdon serve-judge ./my-model --rubric rubric.yaml
  # beside other models, or as a component of a sum, as below
  guerdon serve-judge --config server.yaml
"""

JUDGE_NOTES = """\
MODEL is any causal language model that transformers loads, with its tokenizer. A rubric:

  template: "Q: {prompt}\\nA: {response}\\n{criterion} Say yes or no."
  labels: {yes: 1, no: 0}
  criteria:
    - {name: correct, text: "Is the answer correct?", weight: 2}
    - {name: brief, text: "Is the answer brief?"}

With `compare: {}`, {response_a} and {response_b} in place of {response}, and labels such as {A: 1, B: 0}, it compares
the responses to a prompt, and rewards them relative to each other.

A server may have several judges, and other models beside them:

  models:
    - {kind: judge, name: judge, model: ./my-model, rubric: rubric.yaml}
    - {name: reward_model, model: ./my-reward-model}
"""

SCORE_EXAMPLES = """\
Score a JSONL file through running servers, or by a model loaded in this process.

examples:
  guerdon score --server http://127.0.0.1:5555 in.jsonl -o out.jsonl
  # through two servers that share the load; the input is compressed
  guerdon score --server http://a:5555 --server grpc://b:5557 \\
      in.jsonl.gz -o out.jsonl
  # without a server
  guerdon score --model ./my-reward-model in.jsonl -o out.jsonl
  # how often it prefers the chosen response, as a table and as a picture
  guerdon score --model ./my-reward-model --plot pairs.png \\
      pairs.jsonl -o out.jsonl
  # from a pipe into a pipe
  head in.jsonl | guerdon score --server http://a:5555 - -o - > out.jsonl
"""

SCORE_NOTES = """\
Each line of IN is one of {"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"}, {"messages"} and
{"text"}; files named .gz are decompressed. OUT gets the same lines in the same order with "rewards" added. If the
command stops, the same command continues, provided that the weights are the same. If a sample fails, its reward is
null, "errors" says why, and the exit status is 1. A scoring function may read a line's "prompt" and its "label", any
JSON value.

For pairs, lines with "chosen" and "rejected", a table shows how often the chosen response has the higher reward, in all
and by "subset" or "category" if lines have one. To draw a scored file, run the same command again with --plot: nothing
is scored twice.

--name also applies to --server; a model's other settings require --model. The server's key is read from
GUERDON_API_KEY.
"""

LOGPROBS_EXAMPLES = """\
Write a teacher's log-probs of a JSONL file's responses, and the likeliest ids
of each token, to a folder of safetensors; the same command continues it.

examples:
  guerdon logprobs --server http://127.0.0.1:5555 in.jsonl -o logprobs/
  # without a server
  guerdon logprobs --model ./my-teacher --top-k 64 in.jsonl -o logprobs/
"""
REINFORCE_EXAMPLES = """\
Train a policy by REINFORCE, RLOO or GRPO with a served reward model.

examples:
  # in another terminal
  guerdon serve ./my-reward-model
  # settings from a file as below, one overridden by a flag
  guerdon reinforce run.yaml --rollouts.temperature 0.9
  # the policy sharded over all GPUs
  guerdon reinforce run.yaml --fsdp
"""

REINFORCE_NOTES = """\
CONFIG.yaml has the settings in sections; flags override it:

  policy: {model: ./my-policy, learning_rate: 1e-6}
  data: {prompts: prompts.jsonl}
  rollouts: {rollouts_per_prompt: 8, max_new_tokens: 256}
  reinforce: {advantage_estimator: rloo, kl_coefficient: 0.01}
  remote_rm: {reward_model: {ip: 127.0.0.1, port: 5555}}
  run: {steps: 200, output_dir: out/run}

The same command resumes from the newest checkpoint in run.output_dir, which also holds metrics, curves and samples.
transformers loads the policy of each checkpoint.
"""

PPO_EXAMPLES = """\
Train a policy by PPO with a served critic.

examples:
  # in another terminal
  guerdon serve-critic ./my-reward-model --checkpoint-dir ./critic \\
      --reward-model ./my-reward-model
  # settings from a file as below, one overridden by a flag
  guerdon ppo run.yaml --run.steps 500
  # the policy sharded over four GPUs
  guerdon ppo run.yaml --fsdp --data-parallel 4
"""

PPO_NOTES = """\
CONFIG.yaml has the settings in sections; flags override it:

  policy: {model: ./my-policy, learning_rate: 1e-6}
  data: {prompts: prompts.jsonl}
  rollouts: {rollouts_per_prompt: 1, max_new_tokens: 256}
  ppo: {kl_coefficient: 0.01, critic_warmup_steps: 5}
  remote_critic_rm:
    critic: {ip: 127.0.0.1, port: 5556}
    combine_rm_and_critic_server: true
  run: {steps: 200, output_dir: out/run}

Checkpoints of policy and critic are saved in pairs; the same command resumes from the newest pair.
"""

DISTILL_EXAMPLES = """\
Distil a served teacher into a policy: on-policy, by the reverse KL at each token.

examples:
  # in another terminal
  guerdon serve-teacher ./my-teacher
  # settings from a file as below, one overridden by a flag
  guerdon distill run.yaml --rollouts.temperature 0.9
  # the policy sharded over all GPUs
  guerdon distill run.yaml --fsdp
"""

DISTILL_NOTES = """\
CONFIG.yaml has the settings in sections; flags override it:

  policy: {model: ./my-student, learning_rate: 1e-5}
  data: {prompts: prompts.jsonl}
  rollouts: {prompts_per_step: 16, rollouts_per_prompt: 4, max_new_tokens: 256}
  teacher: {url: "http://127.0.0.1:5555"}
  run: {steps: 200, output_dir: out/run}

The teacher must have the policy's tokenizer. The same command resumes from the newest checkpoint in run.output_dir,
which also holds metrics, curves and samples.
"""

DOCTOR_EXAMPLES = """\
Check the installation, this machine, servers and models, and suggest remedies.

examples:
  guerdon doctor
  # also check a server
  guerdon doctor http://127.0.0.1:5555
  # also load a model: what it is, what its reward is read from, how answers end
  guerdon doctor ./my-reward-model
  # also try a judge's rubric on the first ten rows of a file
  guerdon doctor ./my-judge --rubric rubric.yaml --rows samples.jsonl
  # as JSON; the exit status is 1 if there is a problem
  guerdon doctor --json
"""

CHECK_EXAMPLES = """\
Try a server of rewards, log-probs or judgements for the known faults of such servers, from outside.

examples:
  # in the first form that it answers
  guerdon check http://127.0.0.1:5555
  # beside the checkpoint that it serves, by plain transformers
  guerdon check http://127.0.0.1:8000 --form vllm-classify \\
      --reference ./my-reward-model
  # a server of your own, whose form is a file
  guerdon check http://127.0.0.1:8000 --form my_form.yaml --json
"""

CHECK_NOTES = """\
Each trial held, fell short or is not applicable. Exit status: 0 nothing fell short, 1 something did, 2 the server
cannot be asked. docs/conformance.md says what each trial asks, and what other servers do.
"""

CONVERT_EXAMPLES = """\
Convert a GGUF file, llama.cpp's format, an adapter, or InternLM2 to a folder that can be served.

examples:
  # a language model: a policy, a teacher, or the trunk of a reward model
  guerdon convert model.Q4_1.gguf ./model
  # InternLM2-reward and POLAR, whose code is never run, as Llama
  guerdon convert internlm/internlm2-7b-reward ./internlm2-reward
  guerdon reinforce run.yaml --policy.model ./model
"""

CONVERT_NOTES = """\
Converts files of all architectures that transformers reads. Weights are dequantised; the rounding of the quantisation
remains, so scores differ from the original weights'. GGUF files have no reward head. Needs the extra `gguf`.
"""

COMPLETION_EXAMPLES = """\
Print a script that completes commands, flags and values in a shell.

examples:
  # bash: now, and in every later shell
  source <(guerdon completion bash)
  echo 'source <(guerdon completion bash)' >> ~/.bashrc
  # zsh: ~/.zfunc must be in fpath before compinit runs
  guerdon completion zsh > ~/.zfunc/_guerdon
  # fish
  guerdon completion fish > ~/.config/fish/completions/guerdon.fish
  # tcsh
  guerdon completion tcsh > ~/.guerdon.tcsh; source ~/.guerdon.tcsh
"""

COMMANDS: dict[str, tuple[str, str | None]] = {
    "serve": (SERVE_EXAMPLES, SERVE_NOTES),
    "serve-critic": (CRITIC_EXAMPLES, CRITIC_NOTES),
    "serve-teacher": (TEACHER_EXAMPLES, TEACHER_NOTES),
    "serve-judge": (JUDGE_EXAMPLES, JUDGE_NOTES),
    "score": (SCORE_EXAMPLES, SCORE_NOTES),
    "logprobs": (LOGPROBS_EXAMPLES, None),
    "reinforce": (REINFORCE_EXAMPLES, REINFORCE_NOTES),
    "ppo": (PPO_EXAMPLES, PPO_NOTES),
    "distill": (DISTILL_EXAMPLES, DISTILL_NOTES),
    "doctor": (DOCTOR_EXAMPLES, None),
    "check": (CHECK_EXAMPLES, CHECK_NOTES),
    "convert": (CONVERT_EXAMPLES, CONVERT_NOTES),
    "completion": (COMPLETION_EXAMPLES, None),
}
"""The examples and notes of each command."""
