"""The command line: how flags and YAML become settings, what scoring a file writes, and what errors say."""

import functools
import io
import json
import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from guerdon import __version__, cli
from guerdon.errors import ConfigError
from guerdon.settings import sources
from guerdon.settings.actors import ReinforceRunConfig, check_actor, resolve_schedule
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from processes import environment
from tiers import slow_but

parser = functools.cache(cli.make_parser)


def settings(*argv: str) -> ServerConfig:
    return sources.read_server_settings(parser().parse_args(["serve", *argv]))


def critic_settings(*argv: str) -> ServerConfig:
    return sources.read_critic_settings(parser().parse_args(["serve-critic", *argv]))


def actor_settings(*argv: str) -> ReinforceRunConfig:
    return sources.read_actor_settings(parser().parse_args(["reinforce", *argv]), ReinforceRunConfig)


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr of the command, run in this process."""
    try:
        status = cli.main(argv)
    except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_version() -> None:
    command = [sys.executable, "-m", "guerdon", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    torch = metadata.version("torch")
    assert done.stdout == f"guerdon {__version__}\npython {platform.python_version()}\ntorch {torch}\n"


# Flags and YAML of servers

MODEL = ModelConfig(model="m")
FLAGGED = ModelConfig(
    model="m", dtype="bfloat16", attribute_weights=[0.7, -0.3], deterministic=True, max_length=512, mean=-1.5
)
OVERRIDDEN = "port: 1000\nhost: 127.0.0.9\nmodels: [{model: m, dtype: float16, name: a, deterministic: true}]\n"


@pytest.mark.parametrize(
    ("yaml", "argv", "expected"),
    [
        ("", "m", ServerConfig(models=[MODEL])),
        (
            "",
            "m --port 0 --no-grpc --dtype bfloat16 --attribute-weights 0.7,-0.3 --deterministic --max-length 512 "
            "--mean -1.5",
            ServerConfig(port=0, grpc_port=None, models=[FLAGGED]),
        ),
        (
            "",
            "m --attribute-weights=-0.5,1",
            ServerConfig(models=[ModelConfig(model="m", attribute_weights=[-0.5, 1])]),
        ),
        ("", "m --max-batch-tokens auto", ServerConfig(models=[MODEL])),
        ("models: [{model: m, max_batch_tokens: auto, std: auto}]", "", ServerConfig(models=[MODEL])),
        ("port: 1000", "m", ServerConfig(port=1000, grpc_port=1002, models=[MODEL])),
        (
            OVERRIDDEN,
            "--port 2000 --name b --no-deterministic",
            ServerConfig(
                port=2000, grpc_port=2002, host="127.0.0.9", models=[ModelConfig(model="m", dtype="float16", name="b")]
            ),
        ),
    ],
)
def test_flags_override_yaml(yaml: str, argv: str, expected: ServerConfig, yaml_file: Path) -> None:
    yaml_file.write_text(yaml)
    assert settings(*argv.split(), "--config", str(yaml_file)) == expected
    if not yaml:
        assert settings(*argv.split()) == expected


@pytest.mark.parametrize(
    ("yaml", "argv", "grpc_port"),
    [
        ("", "--port 8000", 8002),
        ("", "--port 0", 0),
        ("", "--port 8000 --grpc-port 9", 9),
        ("", "--port 8000 --no-grpc", None),
        ("", "--port 65535", 65533),
        ("port: 8000", "", 8002),
        ("port: 8000\ngrpc_port: null", "", None),
    ],
)
def test_the_grpc_port_follows_the_http_port(yaml: str, argv: str, grpc_port: int | None, yaml_file: Path) -> None:
    yaml_file.write_text(yaml)
    for read in (settings, critic_settings):
        assert read("m", "--config", str(yaml_file), *argv.split()).grpc_port == grpc_port


CRITIC_YAML = """
critic: {model: m, global_batch_size: 8, max_batch_tokens: auto, learning_rate: 9e-6, betas: [0.8, 0.9],
         lr_schedule: linear, total_steps: 10, lora: 4, activation_checkpointing: true, keep_checkpoints: 3}
"""
CRITIC = functools.partial(
    CriticConfig, model="m", global_batch_size=8, learning_rate=9e-6, betas=[0.8, 0.9], lr_schedule="linear",
    total_steps=10, keep_checkpoints=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("yaml", "argv", "expected"),
    [
        ("", "m", ServerConfig(port=5556, grpc_port=5558, critic=CriticConfig(model="m"))),
        (
            "",
            "m --checkpoint-dir d --reward-model r --learning-rate 1e-4 --betas 0.8,0.9 --no-grpc",
            ServerConfig(
                port=5556,
                grpc_port=None,
                critic=CriticConfig(
                    model="m", checkpoint_dir="d", reward_model="r", learning_rate=1e-4, betas=[0.8, 0.9]
                ),
            ),
        ),
        (
            CRITIC_YAML,
            "--lora 2 --no-activation-checkpointing",
            ServerConfig(port=5556, grpc_port=5558, critic=CRITIC(lora=2)),
        ),
        (
            "port: 7000\nmodels: [{model: r}]",
            "m",
            ServerConfig(port=7000, grpc_port=7002, critic=CriticConfig(model="m"), models=[ModelConfig(model="r")]),
        ),
    ],
)
def test_a_critic_by_flags_and_yaml(yaml: str, argv: str, expected: ServerConfig, yaml_file: Path) -> None:
    yaml_file.write_text(yaml)
    assert critic_settings(*argv.split(), "--config", str(yaml_file)) == expected


def test_serve_takes_a_critic_from_the_file(yaml_file: Path) -> None:
    yaml_file.write_text(CRITIC_YAML)
    expected = ServerConfig(critic=CRITIC(lora=4, activation_checkpointing=True), models=[ModelConfig(model="r")])
    assert settings("r", "--config", str(yaml_file)) == expected


@pytest.mark.parametrize(
    ("read", "yaml", "argv", "message"),
    [
        (critic_settings, "critic: {model: a}", "m", "MODEL is given as m"),
        (critic_settings, "critic: {learning_rate: fast}", "m", r"critic\.learning_rate is 'fast'"),
        (critic_settings, "critic: {learning_rate: .nan}", "m", "learning_rate is nan"),
        (critic_settings, "critic: {weight_decay: .inf}", "m", "weight_decay is inf"),
        (critic_settings, "critic: {dtype: float16}", "m", "dtype is float16"),
        (critic_settings, "critic: {lr: 1}", "m", r"unknown setting critic\.lr"),
        (critic_settings, "critic: {std: 0}", "m", "std is 0"),
        (critic_settings, "critic: {betas: [0.9, 1]}", "m", "betas is"),
        (critic_settings, "critic: {lr_schedule: cosine, total_steps: 5, warmup_steps: 5}", "m", "total_steps is 5"),
        (critic_settings, "critic: {save_every: 5}", "m", "save_every is 5.* no folder"),
        (critic_settings, "critic: {keep_best: loss}", "m", "keep_best is loss.* no folder"),
        (critic_settings, "critic: {reward_model_memory: swap}", "m", "swap.* no reward model"),
        (critic_settings, "models: [{name: a}]", "m", r"models\[0\] names no model"),
        (critic_settings, "[1]", "m", "must be a mapping"),
        (settings, "critic: {learning_rate: 1.0}", "", "the critic names no model"),
        (settings, CRITIC_YAML, "--dtype float16", r"--dtype is given, but .* only a critic"),
        (settings, "models: [{model: a}]", "m", "MODEL is given as m"),
        (settings, "models: [{model: a}, {model: b, name: b}]", "--dtype float16", "--dtype is given, but"),
        (settings, "models: [{name: a}]", "", r"models\[0\] names no model"),
        (settings, "models: [{model: a, max_length: 0}]", "", "max_length is 0"),
        (settings, "ports: 1", "m", "unknown setting ports"),
        (settings, "grpc_port: auto", "m", "grpc_port is 'auto'"),
    ],
)
def test_settings_that_contradict(read: Any, yaml: str, argv: str, message: str, yaml_file: Path) -> None:
    yaml_file.write_text(yaml)
    with pytest.raises(ConfigError, match=message):
        read("--config", str(yaml_file), *argv.split())


# Errors


def test_all_mistakes_in_a_file_are_printed_with_their_lines(
    yaml_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml_file.write_text("prot: 1\nhots: h\nmodels: [{model: m}]\n")
    status, _, err = run("serve", "--config", str(yaml_file), capsys=capsys)
    assert status == 2
    assert err.splitlines() == [
        "guerdon: 2 settings are wrong",
        f"  {yaml_file}, line 1: unknown setting prot; did you mean port?",
        f"  {yaml_file}, line 2: unknown setting hots; did you mean host?",
        "help: correct each of those above",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("serve m --prot 1", "unrecognized arguments: --prot"),
        ("serve m --model-repo .", "unrecognized arguments: --model-repo"),  # no flag may be abbreviated
        ("serve m --port http", "argument --port: invalid int value: 'http'"),
        ("serve m --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("serve m --attribute-weights a", "'a' is not a list of numbers"),
        ("serve m --config absent.yaml", "cannot read absent.yaml: No such file"),
        ("serve m --std 0", "std is 0"),
        ("serve ./absent-folder --port 0", "absent-folder"),
        ("serve --port 0", "no model to serve"),
        ("serve-critic", "no model to make a critic of"),
        ("serve-critic m --lr-schedule cosine", "lr_schedule is cosine, and total_steps is None"),
        ("serve-critic m --betas 0.9", "betas is [0.9]"),
        ("serve-critic ./absent-folder --port 0", "absent-folder"),
        ("score in.jsonl -o out.jsonl", "one of the arguments --server --model is required"),
        ("score --server h:1 --dtype float16 in -o out", "--dtype is given, but the model runs at"),
        ("score --server 127.0.0.1:1 absent.jsonl -o out.jsonl", "cannot read absent.jsonl"),
        ("serve scorers:score --port 0 --model-repository absent", "model_repository is 'absent'"),
        ("serve scorers:score --port 0 --model-repository .", "model_repository is set"),
        ("serv m", "argument COMMAND: invalid choice: 'serv'"),
        ("reinforce absent.yaml", "cannot read absent.yaml"),
        ("ppo absent.yaml", "cannot read absent.yaml"),
    ],
)
def test_errors_at_startup_say_what_to_do(
    argv: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(*argv.split(), capsys=capsys)
    first, *_, last = err.splitlines()
    assert status == 2
    assert first.startswith("guerdon: ") and message in first
    assert last.startswith("help: ")


def test_an_unreachable_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "hello"}\n')
    argv = ["score", "--server", "http://127.0.0.1:9", str(source), "-o", str(tmp_path / "out.jsonl"), "--no-progress"]
    status, _, err = run(*argv, capsys=capsys)
    first, *_, last = err.splitlines()
    assert status == 1
    assert first.startswith("guerdon: ") and "127.0.0.1:9" in first
    assert last.startswith("help: ") and "guerdon doctor" in last
    assert "Traceback" not in err


# Scoring a file

SCORER = """
import os, signal, time
def score(texts):
    if texts[0] == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    return [float("nan") if text == "bad" else 1.0 for text in texts]
"""


@pytest.fixture
def scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a scorer."""
    (tmp_path / "scorer_here.py").write_text(SCORER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "scorer_here", raising=False)
    return tmp_path


SCORE = ("score", "--model", "scorer_here:score", "--no-progress")


def test_the_status_reports_failed_samples(scoring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (scoring / "in.jsonl").write_text('{"text": "fine"}\n{"text": "bad"}\n{"text": "fine"}\n')
    status, _, err = run(*SCORE, "in.jsonl", "-o", "out.jsonl", capsys=capsys)
    assert status == 1
    assert "1 failed, the first:" in err
    assert [json.loads(line)["rewards"] for line in (scoring / "out.jsonl").open()] == [[1.0], [None], [1.0]]


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        (
            '{"text": "fine"}\n{"prompt": "a", "responses": ["b", "c"]}\n',
            "",
            (0, [[1.0], [1.0, 1.0]], "3 samples in 2 rows"),
        ),
        ('{"text": "fine"}\n{"txet": "fine"}\n', "", (2, [], "stdin, line 2: none of the forms")),
        ('{"text": "fine"}\n', "--retry-failed", (2, [], "stdout has no rows to score again")),
    ],
)
def test_a_hyphen_is_stdin_and_stdout(
    rows: str,
    more: str,
    expected: tuple[int, list[list[float]], str],
    scoring: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(rows.encode())))
    status, out, err = run(*SCORE, "-", "-o", "-", *more.split(), capsys=capsys)
    assert (status, [json.loads(line)["rewards"] for line in out.splitlines()]) == expected[:2]
    assert expected[2] in err
    assert {path.name for path in scoring.iterdir()} <= {"scorer_here.py", "__pycache__"}


@pytest.mark.slow
def test_ctrl_c_ends_a_run_soon(scoring: Path) -> None:
    (scoring / "in.jsonl").write_text('{"text": "interrupt"}\n' * 100)
    command = [sys.executable, "-m", "guerdon", *SCORE, "in.jsonl", "-o", "out.jsonl"]
    done = subprocess.run(command, env=environment(), capture_output=True, check=False, timeout=120)  # all: 100 s
    assert done.returncode == 130


# Actors


@pytest.mark.parametrize("argv", ["serve --model m", "serve-judge --model=m", "reinforce --config run.yaml"])
def test_what_needs_no_flag_is_suggested_without_one(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(*argv.split(), capsys=capsys)
    name = "CONFIG" if "config" in argv else "MODEL"
    assert status == 2 and f"did you mean {name}, without a flag?" in err


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


def test_an_abbreviated_setting_is_suggested(run_yaml: str) -> None:
    Path(run_yaml).write_text("policy: {lr: 1e-6}\n")
    with pytest.raises(ConfigError) as caught:
        actor_settings(run_yaml)
    assert caught.value.help.startswith("did you mean learning_rate? ")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_missing_engine_is_told_before_the_run_waits_for_its_server(
    run_yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "2+2?"}\n' * 64)
    flags = ["--policy.model", str(tmp_path), "--data.prompts", str(prompts), "--rollouts.engine", "vllm"]
    status, _, err = run("reinforce", run_yaml, *flags, capsys=capsys)
    assert status == 2 and "guerdon: vllm is not installed" in err and "[vllm]" in err


def test_an_actors_flags_are_paths_in_its_yaml_and_override_it(run_yaml: str) -> None:
    config = actor_settings(
        run_yaml, "--policy.lora", "4", "--rollouts.max_new_tokens=7", "--rollouts.stop", "a", "--rollouts.stop", "b",
        "--remote-rm.reward-model.port", "77", "--no-run.resume", "--policy.betas", "0.5,0.6",
    )  # fmt: skip
    assert (config.policy.model, config.policy.learning_rate, config.policy.lora) == ("./p", 1e-6, 4)
    assert (config.rollouts.max_new_tokens, config.rollouts.stop) == (7, ["a", "b"])
    assert (config.remote_rm.reward_model.ip, config.remote_rm.reward_model.port) == ("10.0.0.1", 77)
    assert not config.run.resume and config.policy.betas == [0.5, 0.6]
    config = actor_settings(run_yaml)
    assert config.rollouts.stop == ["END"] and config.remote_rm.reward_model.port == 1234
    assert config.rollouts.temperature == 1.0 and config.run == ReinforceRunConfig().run


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
def test_a_boolean_flag_may_have_a_value(given: str, is_on: bool, run_yaml: str) -> None:
    assert actor_settings(*given.split(), run_yaml).data.template is is_on
    assert actor_settings(run_yaml, *given.split(), "--run.steps", "3").data.template is is_on


def test_a_boolean_flag_takes_no_other_value(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        actor_settings(run_yaml, "--data.template=yes")
    assert "--data.template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("reinforce", "rewards come from http://10.0.0.1:1234; results go to out/run"),
        *slow_but((), [("ppo", "values and rewards come from http://localhost:5556; results go to out/run")]),
        *slow_but((), [("distill", "the teacher's log-probs come from http://10.0.0.1:9; results go to out/run")]),
    ],
)
def test_an_actor_says_what_it_loads_before_torch_is_imported(
    command: str, says: str, run_yaml: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")  # -m finds it first
    others = {"ppo": "", "distill": "teacher: {url: 'http://10.0.0.1:9'}\n"}
    if command in others:
        Path(run_yaml).write_text(Path(run_yaml).read_text().partition("remote_rm")[0] + others[command])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 40)
    (tmp_path / "p").mkdir()
    argv = [sys.executable, "-m", "guerdon", command, run_yaml]
    done = subprocess.run(argv, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"guerdon: loading policy ./p, prompts prompts.jsonl; {says}\n"
    assert done.stderr.endswith("torch is imported\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--data.prompts absent.jsonl", "there is no absent.jsonl"),
        *slow_but((), [("--data.prompts absent.json", "there is no absent.json")]),
        *slow_but((), [("", "prompts.jsonl, row 1 (from 0): it has no field prompt, only text")]),
        *slow_but((), [("--data.field text", "prompts.jsonl, row 0 (from 0): it has no field text, only prompt")]),
    ],
)
def test_an_actor_checks_its_prompts_before_torch_is_imported(
    argv: str, says: str, run_yaml: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}\n')
    (tmp_path / "p").mkdir()
    command = [sys.executable, "-m", "guerdon", "reinforce", run_yaml, *argv.split()]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and "torch is imported" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--data.prompts=", "data.prompts is not given"),
        ("--policy.model=", "policy.model is not given"),
        ("--rollouts.temperature 0", "rollouts.temperature is 0"),
        ("--rollouts.rollouts-per-prompt 1", "rloo compares responses"),
        ("--rollouts.top-p 1.5", "top_p is 1.5"),
        ("--reinforce.clip-low 0", "clip_low is 0"),
        ("--run.trackers paper", "run.trackers has paper"),
        ("--policy.dtype float16", "dtype is float16"),
        ("--run.steps 0", "run.steps is 0"),
        ("--reinforce.global-batch-size 0", "reinforce.global_batch_size is 0"),
        ("--reinforce.epochs 0", "reinforce.epochs is 0"),
        ("--policy.lr-schedule linear --policy.warmup-steps 9999", "policy.lr_schedule is linear"),
        ("--policy.lora-targets .*q_proj", "policy.lora_targets is .*q_proj, but lora is not set"),
        ("--policy.lora-alpha 16", "policy.lora_alpha is 16.0, but lora is not set"),
        ("--rollouts.repetition-penalty 0", "rollouts.repetition_penalty is 0"),
        ("--rollouts.min-new-tokens 200", "rollouts.min_new_tokens is 200"),
        ("--rollouts.top-k 1", "rollouts.top_k is 1"),
        ("--rollouts.top-p 0", "rollouts.top_p is 0"),
        ("--remote-rm.send text --remote-rm.pad-to-length 64", "remote_rm.pad_to_length is 64"),
        ("--remote-rm.suffix </s>", "remote_rm.suffix is"),
        ("--run.time-limit 12:00", "run.time_limit is '12:00'"),
        ("", "there is no ./p"),
        ("--rollouts.top-k 1 --run.time-limit 12:00", "rollouts.top_k is 1"),  # with all other contradictions
        ("--rollouts.top-k 1 --run.time-limit 12:00", "run.time_limit is '12:00'"),
    ],
)
def test_settings_of_an_actor_that_cannot_be(
    argv: str, says: str, run_yaml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run("reinforce", run_yaml, *argv.split(), capsys=capsys)
    assert status == 2
    assert says in err and "help: " in err


@pytest.mark.parametrize(
    ("command", "yaml", "says"),
    [
        ("ppo", "policy: {model: ./p}\nrollouts: {maximum: 3}", ["unknown setting rollouts.maximum"]),
        ("reinforce", "run: {time_limit: 210}", ["run.time_limit is ", "in quotes"]),
        ("reinforce", "run: {time_limit: 1:03:30:00}", ["run.time_limit is ", "in quotes"]),
        (
            "reinforce",
            "remote_rm: {reward_model: {urls: ['ftp://x:1']}}",
            ["'ftp://x:1' is malformed", "help: correct "],
        ),
        ("ppo", "remote_critic_rm: {critic: {url: 'ftp://x:1'}}", ["'ftp://x:1' is malformed", "help: correct "]),
        ("distill", "teacher: {url: 'ftp://x:1'}", ["'ftp://x:1' is malformed", "help: correct teacher.url"]),
        ("distill", "run: {steps: 3}", ["teacher.url is not given", "help: give the URL"]),
        ("distill", "reference: {url: 'http://x:1'}", ["unknown setting reference"]),
        ("distill", "distill: {kl_coefficient: 0.1}", ["unknown setting distill.kl_coefficient"]),
        ("distill", "teacher: {url: 'http://x:1'}\ndistill: {clip_low: 0}", ["distill.clip_low is 0"]),
    ],
)
def test_mistakes_in_an_actors_file(
    command: str, yaml: str, says: list[str], yaml_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = "" if "policy" in yaml else "policy: {model: some-org/policy}\ndata: {prompts: some-org/prompts}\n"
    yaml_file.write_text(hub + yaml)
    status, _, err = run(command, str(yaml_file), capsys=capsys)
    assert status == 2
    assert all(part in err for part in says)


def test_the_schedule_is_as_long_as_the_run() -> None:
    config = ReinforceRunConfig()
    config.policy.model = config.data.prompts = "x"
    config.policy.lr_schedule = "linear"
    config.run.steps, config.reinforce.epochs, config.reinforce.global_batch_size = 10, 3, 40
    check_actor(config)
    assert resolve_schedule(config).total_steps == 60  # 16 prompts of 4 responses are 2 global batches of 40
    assert config.policy.total_steps is None  # a run with the same settings may have another length


def test_only_local_files_must_exist(tmp_path: Path) -> None:
    config = ReinforceRunConfig()
    config.policy.model, config.data.prompts = "some-org/policy", "some-org/prompts"
    check_actor(config)
    config.data.validation = str(tmp_path / "v.jsonl")
    with pytest.raises(ConfigError, match=r"there is no .*v\.jsonl"):
        check_actor(config)
