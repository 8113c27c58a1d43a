"""verl's on-policy distillation from served teachers:

    python -m guerdon.adapters.verl_teacher FLAGS distillation.enabled=True \\
        distillation.teacher_models.teacher_model.model_path=http://host:5555

FLAGS are those of `python -m verl.trainer.main_ppo`, and a teacher's `model_path` is its server's URL, with
`?model=NAME` if it is not called `teacher`. verl itself loads teachers into vLLM or SGLang, on GPUs set apart for them;
here its trainer sets none apart, and its rollout workers ask the servers.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from guerdon.adapters.judge import TIMEOUT_S
from guerdon.client import AsyncTeacherClient, RetryPolicy
from guerdon.errors import ConfigError, InvalidRequest


@dataclasses.dataclass
class TeacherOutput:
    """A teacher's answer as verl reads it: `prompt_ids` and `prompt_logprobs`, `[T, K]` each."""

    extra_fields: dict[str, np.ndarray]


class TeacherServerClient:
    """Stands for verl's LLMServerClient of one teacher; Ray pickles it for each rollout worker."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError if the teacher's `model_path` is no URL; connects at the first call."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "grpc", "grpcs"):
            raise ConfigError(f"a teacher's model_path is {url!r}", "give its server's URL, such as http://host:5555")
        query = parse_qs(parts.query)
        if query.keys() - {"model"}:
            raise ConfigError(f"unknown key in {url!r}", "only ?model=NAME is known")
        (name,) = query.get("model", ["teacher"])
        policy = RetryPolicy.patient(TIMEOUT_S, wait_for_start=True)
        self._client = AsyncTeacherClient(parts._replace(query="").geturl(), name, policy=policy)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> TeacherOutput:
        """Returns the log-probs of the actual tokens, K = 1, or of the K = `prompt_logprobs` likeliest ids.

        Row t is about token t + 1, as verl counts, and the last row is 0. Raises InvalidRequest for images,
        SampleFailed with the server's reason, and GuerdonError if the server cannot be reached in time.
        """
        if any(media.get(name) for name in ("image_data", "video_data", "audio_data")):
            raise InvalidRequest("a served teacher takes token ids only, and this sample has images, video or audio")
        k = sampling_params["prompt_logprobs"]
        if k:
            answers = (await self._client.top(k, tokens=[prompt_ids])).raise_for_failed()
            assert answers.top_ids is not None and answers.top_logprobs is not None
            ids, logprobs = answers.top_ids[0], answers.top_logprobs[0]
        else:
            answers = await self._client.logprobs(tokens=[prompt_ids])
            if answers.chunks is not None:  # verl would make a loss of NaN
                raise InvalidRequest(
                    "the teacher's student_tokenizer gives some tokens no log-prob, and verl needs one for each: serve "
                    "a teacher with the policy's tokenizer"
                )
            answers.raise_for_failed()
            assert answers.logprobs is not None
            ids, logprobs = np.array(prompt_ids[1:], np.int32)[:, None], answers.logprobs[0][:, None]
        ends = ((0, 1), (0, 0))
        return TeacherOutput({"prompt_ids": np.pad(ids, ends), "prompt_logprobs": np.pad(logprobs, ends)})


class TeacherServerManager:
    """Stands for verl's MultiTeacherModelManager, and starts nothing."""

    def __init__(self, config: Any, resource_pool: Any) -> None:
        from verl.utils.config import omega_conf_to_dataclass

        models = omega_conf_to_dataclass(config.distillation).teacher_models
        self._teachers = {key: TeacherServerClient(model.model_path) for key, model in models.items()}

    def get_client(self) -> dict[str, TeacherServerClient]:
        return self._teachers


def use_teacher_servers() -> None:
    """Makes verl's trainers in this process use TeacherServerManager, and set no GPUs apart for them."""
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import trainer_base

    allot = trainer_base.PPOTrainer._init_resource_pool_mgr

    def allot_none_to_teachers(trainer: Any) -> None:
        distillation = trainer.config.distillation
        is_enabled, distillation.enabled = distillation.enabled, False
        try:
            allot(trainer)
        finally:
            distillation.enabled = is_enabled
        trainer.mapping[Role.TeacherModel] = "global_pool"  # verl looks it up; TeacherServerManager does not use it

    trainer_base.PPOTrainer._init_resource_pool_mgr = allot_none_to_teachers
    trainer_base.MultiTeacherModelManager = TeacherServerManager


class TaskRunner:
    """Runs verl's own task, in a Ray actor."""

    def run(self, config: Any) -> None:
        from verl.trainer.main_ppo import TaskRunnerV1

        use_teacher_servers()
        TaskRunnerV1.__ray_metadata__.modified_class().run(config)


def main() -> None:
    """Runs verl's trainer with the flags of the command line."""
    import ray
    from verl.trainer import main_ppo

    main_ppo.TaskRunnerV1 = ray.remote(TaskRunner)
    main_ppo.main()


if __name__ == "__main__":
    from guerdon.adapters import verl_teacher

    verl_teacher.main()  # so that Ray's workers find the classes by the module's name
