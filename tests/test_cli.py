"""The command line: what it says, how flags and YAML meet, and how it ends when it cannot start."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from guerdon import __version__, cli
from guerdon.errors import ConfigError
from guerdon.settings import sources
from guerdon.settings.actors import ReinforceRunConfig, check_actor, resolve_schedule
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from processes import environment


def settings(*argv: str) -> ServerConfig:
    return sources.read_server_settings(cli.make_parser().parse_args(["serve", *argv]))


def critic_settings(*argv: str) -> ServerConfig:
    return sources.read_critic_settings(cli.make_parser().parse_args(["serve-critic", *argv]))


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of the command in this process."""
    try:
        status = cli.main(argv)
    except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    torch = metadata.version("torch")
    told = f"guerdon {__version__}\npython {platform.python_version()}\ntorch {torch}\n"
    assert run("--version", capsys=capsys) == (0, told, "")
    status, out, _ = run("--help", capsys=capsys)
    assert status == 0
    assert "guerdon serve ./my-reward-model" in out


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "guerdon", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.split()[:3] == ["guerdon", __version__, "python"]


def test_help_shows_each_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("serve", "--help", capsys=capsys)
    text = " ".join(out.split())
    assert "HTTP port. 0: any free port. (default: 5555)" in text
    assert "--truncation {error,left,right}" in text
    assert "--deterministic, --no-deterministic" in text
    assert "--models" not in text


def test_flags_become_settings() -> None:
    config = settings(
        "m", "--port", "0", "--no-grpc", "--dtype", "bfloat16", "--attribute-weights", "0.7,-0.3", "--deterministic",
        "--max-length", "512", "--mean", "-1.5",
    )  # fmt: skip
    model = ModelConfig(
        model="m", dtype="bfloat16", attribute_weights=[0.7, -0.3], deterministic=True, max_length=512, mean=-1.5
    )
    assert config == ServerConfig(port=0, grpc_port=None, models=[model])


def test_auto_may_be_written_out(tmp_path: Path) -> None:
    (model,) = settings("m", "--max-batch-tokens", "auto", "--max-length", "512").models
    assert (model.max_batch_tokens, model.max_length) == (None, 512)
    file = tmp_path / "server.yaml"
    file.write_text("models: [{model: m, max_batch_tokens: auto, std: auto}]\n")
    (model,) = settings("--config", str(file)).models
    assert (model.max_batch_tokens, model.std) == (None, None)
    file.write_text("grpc_port: auto\n")
    with pytest.raises(ConfigError, match="grpc_port is 'auto'"):
        settings("m", "--config", str(file))


def test_without_flags_all_are_defaults() -> None:
    assert settings("m") == ServerConfig(models=[ModelConfig(model="m")])


def test_all_mistakes_of_a_file_reach_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("prot: 1\nhots: h\nmodels: [{model: m}]\n")
    status, _, err = run("serve", "--config", str(file), capsys=capsys)
    assert status == 2
    assert err.splitlines() == [
        "guerdon: 2 settings are wrong",
        f"  {file}, line 1: unknown setting prot; did you mean port?",
        f"  {file}, line 2: unknown setting hots; did you mean host?",
        "help: correct each of those above",
    ]


def test_a_server_finds_its_grpc_port_by_its_http_port(tmp_path: Path) -> None:
    assert settings("m", "--port", "8000").grpc_port == 8002
    assert critic_settings("m", "--port", "8000").grpc_port == 8002
    assert settings("m", "--port", "0").grpc_port == 0
    assert settings("m", "--port", "8000", "--grpc-port", "9").grpc_port == 9
    assert settings("m", "--port", "8000", "--no-grpc").grpc_port is None
    assert settings("m", "--port", "65535").grpc_port == 65533
    file = tmp_path / "server.yaml"
    file.write_text("port: 8000\n")
    assert settings("m", "--config", str(file)).grpc_port == 8002
    file.write_text("port: 8000\ngrpc_port: null\n")
    assert settings("m", "--config", str(file)).grpc_port is None


def test_flags_go_before_yaml(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "port: 1000\nhost: 127.0.0.9\nmodels:\n  - {model: m, dtype: float16, name: a, deterministic: true}\n"
    )
    config = settings("--config", str(file), "--port", "2000", "--name", "b", "--no-deterministic")
    assert (config.port, config.host) == (2000, "127.0.0.9")
    assert config.models == [ModelConfig(model="m", dtype="float16", name="b")]


def test_model_of_the_command_line_with_a_yaml_of_server_settings(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1000\n")
    assert settings("m", "--config", str(file)) == ServerConfig(
        port=1000, grpc_port=1002, models=[ModelConfig(model="m")]
    )


CRITIC_YAML = """
critic:
  model: m
  global_batch_size: 8
  max_batch_tokens: auto
  learning_rate: 9e-6
  betas: [0.8, 0.9]
  lr_schedule: linear
  total_steps: 10
  lora: 4
  activation_checkpointing: true
  keep_checkpoints: 3
"""


def test_a_critic_by_flags_listens_on_ports_of_its_own() -> None:
    config = critic_settings("m", "--checkpoint-dir", "d", "--reward-model", "r", "--learning-rate", "1e-4",
                             "--betas", "0.8,0.9", "--global-batch-size", "8", "--no-grpc")  # fmt: skip
    critic = CriticConfig(
        model="m", checkpoint_dir="d", reward_model="r", learning_rate=1e-4, betas=[0.8, 0.9], global_batch_size=8
    )
    assert config == ServerConfig(port=5556, grpc_port=None, critic=critic)
    assert critic_settings("m").grpc_port == 5558


def test_a_critic_by_yaml_with_flags_before_it(tmp_path: Path) -> None:
    file = tmp_path / "critic.yaml"
    file.write_text(CRITIC_YAML)
    config = critic_settings("--config", str(file), "--lora", "2", "--no-activation-checkpointing")
    assert (config.port, config.grpc_port) == (5556, 5558)
    assert config.critic == CriticConfig(
        model="m", global_batch_size=8, learning_rate=9e-6, betas=[0.8, 0.9], lr_schedule="linear", total_steps=10,
        lora=2, keep_checkpoints=3,
    )  # fmt: skip
    file.write_text("port: 7000\nmodels: [{model: r}]\n")
    config = critic_settings("m", "--config", str(file))
    assert (config.port, config.critic, len(config.models)) == (7000, CriticConfig(model="m"), 1)


def test_serve_takes_a_critic_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(CRITIC_YAML)
    config = settings("r", "--config", str(file))
    assert config.port == 5555 and config.critic is not None and config.critic.learning_rate == 9e-6
    assert config.models == [ModelConfig(model="r")]
    with pytest.raises(ConfigError, match=r"--dtype is given, but .* only a critic"):
        settings("--config", str(file), "--dtype", "float16")


def test_help_of_a_critic_shows_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(run("serve-critic", "--help", capsys=capsys)[1].split())
    assert "HTTP port. 0: any free port. (default: 5556)" in text
    assert "--betas X,Y Betas of AdamW. (default: 0.9,0.98)" in text
    assert "default: only on request." in text and "request. (default" not in text
    assert "MISSING" not in text
    assert "--no-grpc Serve HTTP only." in text
    assert "--keep-best-mode {auto,max,min}" in text
    assert "biases and norms" in text


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("critic: {model: a}", "MODEL is given as m"),
        ("critic: {learning_rate: fast}", r"critic\.learning_rate is 'fast'"),
        ("critic: {learning_rate: .nan}", "learning_rate is nan"),
        ("critic: {weight_decay: .inf}", "weight_decay is inf"),
        ("critic: {dtype: float16}", "dtype is float16"),
        ("critic: {lr: 1}", r"unknown setting critic\.lr"),
        ("critic: {std: 0}", "std is 0"),
        ("critic: {betas: [0.9, 1]}", "betas is"),
        (
            "critic: {lr_schedule: cosine, total_steps: 5, warmup_steps: 5}",
            "lr_schedule is cosine, and total_steps is 5",
        ),
        ("critic: {save_every: 5}", "save_every is 5.* no folder"),
        ("critic: {keep_best: loss}", "keep_best is loss.* no folder"),
        ("critic: {reward_model_memory: swap}", "swap.* no reward model"),
        ("models: [{name: a}]", r"models\[0\] names no model"),
        ("[1]", "must be a mapping"),
    ],
)
def test_settings_of_a_critic_that_contradict(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "critic.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError, match=message):
        critic_settings("m", "--config", str(file))


@pytest.mark.parametrize(
    ("yaml", "argv", "message"),
    [
        ("critic: {learning_rate: 1.0}", [], "the critic names no model"),
        ("models: [{model: a}]", ["m"], "MODEL is given as m"),
        ("models: [{model: a}, {model: b, name: b}]", ["--dtype", "float16"], "--dtype is given, but"),
        ("models: [{name: a}]", [], r"models\[0\] names no model"),
        ("models: [{model: a, max_length: 0}]", [], "max_length is 0"),
        ("ports: 1", ["m"], "unknown setting ports"),
    ],
)
def test_settings_that_contradict(tmp_path: Path, yaml: str, argv: list[str], message: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError, match=message):
        settings("--config", str(file), *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "m", "--prot", "1"], "unrecognized arguments: --prot"),
        (["serve", "m", "--port", "http"], "argument --port: invalid int value: 'http'"),
        (["serve", "m", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["serve", "m", "--attribute-weights", "a"], "'a' is not a list of numbers"),
        (["serve", "m", "--config", "absent.yaml"], "cannot read absent.yaml: No such file"),
        (["serve", "m", "--std", "0"], "std is 0"),
        (["serve", "./absent-folder", "--port", "0", "--grpc-port", "0"], "absent-folder"),
        (["serve", "--port", "0", "--grpc-port", "0"], "no model to serve"),
        (["serve-critic"], "no model to make a critic of"),
        (["serve-critic", "m", "--lr-schedule", "cosine"], "lr_schedule is cosine, and total_steps is None"),
        (["serve-critic", "m", "--betas", "0.9"], "betas is [0.9]"),
        (["serve-critic", "./absent-folder", "--port", "0", "--grpc-port", "0"], "absent-folder"),
        (["score", "in.jsonl", "-o", "out.jsonl"], "one of the arguments --server --model is required"),
        (
            ["score", "--server", "h:1", "--dtype", "float16", "in", "-o", "out"],
            "--dtype is given, but the model runs at",
        ),
        (["score", "--server", "127.0.0.1:1", "absent.jsonl", "-o", "out.jsonl"], "cannot read absent.jsonl"),
        (["demo", "--steps", "3"], "the demo is not installed"),
        (
            ["serve", "scorers:score", "--port", "0", "--grpc-port", "0", "--model-repository", "absent"],
            "model_repository is 'absent', which is no folder",
        ),
        (
            ["serve", "scorers:score", "--port", "0", "--grpc-port", "0", "--model-repository", "."],
            "model_repository is set, and nobody may load from it",
        ),
        (["serv", "m"], "argument COMMAND: invalid choice: 'serv'"),
    ],
)
def test_what_cannot_start_says_what_to_do(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(*argv, capsys=capsys)
    first, *_, last = err.splitlines()
    assert status == 2
    assert first.startswith("guerdon: ")
    assert message in first
    assert last.startswith("help: ")


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "hello"}\n')
    argv = ["score", "--server", "http://127.0.0.1:9", str(source), "-o", str(tmp_path / "out.jsonl"), "--no-progress"]
    status, _, err = run(*argv, capsys=capsys)
    assert status == 1
    first, *_, last = err.splitlines()
    assert first.startswith("guerdon: ") and "127.0.0.1:9" in first
    assert last.startswith("help: ") and "guerdon doctor" in last
    assert "Traceback" not in err


SCORER = """
import sys, time
def score(texts):
    time.sleep(0.05 * len(texts))
    print("scoring", file=sys.stderr, flush=True)
    return [float("nan") if text == "bad" else 1.0 for text in texts]
"""


def start_score(folder: Path, num_rows: int) -> subprocess.Popen[str]:
    (folder / "scorer_here.py").write_text(SCORER)
    rows = [json.dumps({"text": "bad" if i == 1 else "fine"}) for i in range(num_rows)]
    (folder / "in.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-m", "guerdon", "score", "--model", "scorer_here:score", "in.jsonl", "-o", "out.jsonl"]
    return subprocess.Popen(
        [*command, "--no-progress"], cwd=folder, stderr=subprocess.PIPE, text=True, env=environment()
    )


def test_the_status_tells_of_failed_samples(tmp_path: Path) -> None:
    process = start_score(tmp_path, 3)
    _, err = process.communicate(timeout=60)
    assert "1 failed, the first:" in err
    assert process.returncode == 1
    assert [json.loads(line)["rewards"] for line in (tmp_path / "out.jsonl").open()] == [[1.0], [None], [1.0]]


def scored_by_pipes(folder: Path, rows: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "scorer_here.py").write_text(SCORER)
    command = [sys.executable, "-m", "guerdon", "score", "--model", "scorer_here:score", "-", "-o", "-", *more]
    return subprocess.run(
        command, cwd=folder, input=rows, capture_output=True, text=True, env=environment(), timeout=60, check=False
    )


def test_a_hyphen_is_stdin_and_stdout(tmp_path: Path) -> None:
    done = scored_by_pipes(tmp_path, '{"text": "fine"}\n{"prompt": "a", "responses": ["b", "c"]}\n')
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["rewards"] for line in done.stdout.splitlines()] == [[1.0], [1.0, 1.0]]
    assert "3 samples in 2 rows" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"scorer_here.py", "__pycache__"}


def test_what_comes_over_stdin_is_checked_before_it_is_scored(tmp_path: Path) -> None:
    done = scored_by_pipes(tmp_path, '{"text": "fine"}\n{"txet": "fine"}\n')
    assert (done.returncode, done.stdout) == (2, "") and " stdin, line 2: none of the forms" in done.stderr
    done = scored_by_pipes(tmp_path, '{"text": "fine"}\n', "--retry-failed")
    assert done.returncode == 2 and "stdout has no rows to score again" in done.stderr


def test_ctrl_c_ends_a_run_soon(tmp_path: Path) -> None:
    process = start_score(tmp_path, 2000)
    assert process.stderr is not None
    for line in process.stderr:
        if "scoring" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)  # all of it would take 100 s
    assert process.returncode == 130


def test_weights_with_a_leading_minus(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--attribute-weights=-0.5,1" in " ".join(run("serve", "--help", capsys=capsys)[1].split())
    assert settings("m", "--attribute-weights=-0.5,1").models[0].attribute_weights == [-0.5, 1.0]


def actor_settings(*argv: str) -> ReinforceRunConfig:
    return sources.read_actor_settings(cli.make_parser().parse_args(["reinforce", *argv]), ReinforceRunConfig)


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "policy: {model: ./p, learning_rate: 1e-6}\n"
        "data: {prompts: prompts.jsonl}\n"
        "rollouts: {stop: [END]}\n"
        "remote_rm: {reward_model: {ip: 10.0.0.1, port: 1234}}\n"
    )
    return str(path)


def test_an_actors_flags_are_paths_in_its_yaml_and_go_before_it(run_yaml: str) -> None:
    config = actor_settings(
        run_yaml, "--policy.lora", "4", "--rollouts.max_new_tokens=7", "--rollouts.stop", "a", "--rollouts.stop", "b",
        "--remote-rm.reward-model.port", "77", "--no-run.resume", "--policy.betas", "0.5,0.6",
    )  # fmt: skip
    assert (config.policy.model, config.policy.learning_rate, config.policy.lora) == ("./p", 1e-6, 4)
    assert (config.rollouts.max_new_tokens, config.rollouts.stop) == (7, ["a", "b"])
    assert (config.remote_rm.reward_model.ip, config.remote_rm.reward_model.port) == ("10.0.0.1", 77)
    assert not config.run.resume and config.policy.betas == [0.5, 0.6]


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ("--data.template true", True),
        ("--data.template=true", True),
        ("--data.template", True),
        ("--data.template false", False),
        ("--data.template=false", False),
        ("--no-data.template", False),
        ("--no-data.template false", True),
    ],
)
def test_a_boolean_may_be_written_out(given: str, is_on: bool, run_yaml: str) -> None:
    assert actor_settings(*given.split(), run_yaml).data.template is is_on
    assert actor_settings(run_yaml, *given.split(), "--run.steps", "3").data.template is is_on


def test_a_boolean_is_one_of_two_words(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        actor_settings(run_yaml, "--data.template=yes")
    assert "--data.template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("reinforce", "rewards come from http://10.0.0.1:1234; results go to out/run"),
        ("ppo", "values and rewards come from http://localhost:5556; results go to out/run"),
    ],
)
def test_an_actor_says_what_it_loads_before_torch_is_imported(
    command: str, says: str, run_yaml: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch comes now')")  # where -m looks first
    text = Path(run_yaml).read_text()
    Path(run_yaml).write_text(text if command == "reinforce" else text.partition("remote_rm")[0])
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "p").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "guerdon", command, run_yaml],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"guerdon: loading policy ./p, prompts prompts.jsonl; {says}\n"
    assert done.stderr.endswith("torch comes now\n")


def test_an_actors_yaml_alone(run_yaml: str) -> None:
    config = actor_settings(run_yaml)
    assert config.rollouts.stop == ["END"] and config.remote_rm.reward_model.port == 1234
    assert config.rollouts.temperature == 1.0 and config.run == ReinforceRunConfig().run


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--data.prompts", ""], "data.prompts is not given"),
        (["--policy.model", ""], "policy.model is not given"),
        (["--rollouts.temperature", "0"], "rollouts.temperature is 0"),
        (["--rollouts.rollouts-per-prompt", "1"], "rloo compares responses"),
        (["--rollouts.top-p", "1.5"], "top_p is 1.5"),
        (["--reinforce.clip-low", "0"], "clip_low is 0"),
        (["--run.trackers", "paper"], "run.trackers has paper"),
        (["--policy.dtype", "float16"], "dtype is float16"),
        (["--run.steps", "0"], "run.steps is 0"),
        (["--reinforce.global-batch-size", "0"], "reinforce.global_batch_size is 0"),
        (["--reinforce.epochs", "0"], "reinforce.epochs is 0"),
        (["--policy.lr-schedule", "linear", "--policy.warmup-steps", "9999"], "policy.lr_schedule is linear"),
        (["--rollouts.repetition-penalty", "0"], "rollouts.repetition_penalty is 0"),
        (["--rollouts.min-new-tokens", "200"], "rollouts.min_new_tokens is 200"),
        (["--rollouts.top-k", "1"], "rollouts.top_k is 1"),
        (["--rollouts.top-p", "0"], "rollouts.top_p is 0"),
        (["--remote-rm.send", "text", "--remote-rm.pad-to-length", "64"], "remote_rm.pad_to_length is 64"),
        (["--remote-rm.suffix", "</s>"], "remote_rm.suffix is"),
        (["--run.time-limit", "12:00"], "run.time_limit is '12:00'"),
        ([], "there is no ./p"),
    ],
)
def test_settings_of_an_actor_that_cannot_be(
    argv: list[str], says: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reinforce", run_yaml, *argv]) == 2
    error = capsys.readouterr().err
    assert says in error and "help: " in error


def test_an_unknown_section_or_setting_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy: {model: ./p}\nrollouts: {maximum: 3}\n")
    assert cli.main(["ppo", str(path)]) == 2
    assert "unknown setting rollouts.maximum" in capsys.readouterr().err


def test_the_schedules_length_is_that_of_the_run() -> None:
    config = ReinforceRunConfig()
    config.policy.model = config.data.prompts = "x"
    config.policy.lr_schedule = "linear"
    config.run.steps, config.reinforce.epochs, config.reinforce.global_batch_size = 10, 3, 40
    check_actor(config)
    assert resolve_schedule(config).total_steps == 60  # 16 prompts of 4 responses are 2 global batches of 40
    assert config.policy.total_steps is None  # another run with the same settings may be of another length


def test_an_actors_settings_that_are_fine_and_files_that_are_not_there(tmp_path: Path) -> None:
    config = ReinforceRunConfig()
    config.policy.model, config.data.prompts = "some-org/policy", "some-org/prompts"
    check_actor(config)
    config.data.validation = str(tmp_path / "v.jsonl")
    with pytest.raises(ConfigError, match=r"there is no .*v\.jsonl"):
        check_actor(config)


@pytest.mark.parametrize("limit", ["210", "1:03:30:00"])
def test_a_time_limit_that_yaml_takes_for_a_number_is_told(
    limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{time_limit: {limit}}}\n")
    assert cli.main(["reinforce", str(path)]) == 2
    error = capsys.readouterr().err
    assert "run.time_limit is " in error and "in quotes" in error


@pytest.mark.parametrize("command", ["reinforce", "ppo"])
def test_an_actor_without_its_file_or_with_a_url_that_is_none(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(tmp_path / "nope.yaml")]) == 2
    assert "--config" not in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(
        "policy: {model: some-org/policy}\ndata: {prompts: some-org/prompts}\n"
        "remote_rm: {reward_model: {urls: ['ftp://x:1']}}\n" if command == "reinforce" else
        "policy: {model: some-org/policy}\ndata: {prompts: some-org/prompts}\n"
        "remote_critic_rm: {critic: {url: 'ftp://x:1'}}\n"
    )  # fmt: skip
    assert cli.main([command, str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err
    assert "server URL 'ftp://x:1' is malformed" in error and "help: correct " in error
