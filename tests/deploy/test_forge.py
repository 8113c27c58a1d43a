"""What a forge reads: workflows, forms, the image, the citation and the package's metadata fit the repository.

actionlint is tried if it is installed, and the linters of the extra `manifests`, which `make manifests` installs.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.manifests import DEPLOY, ROOT, read

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = [FORGE / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = ["SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", "pyproject.toml", "CONTRIBUTING.md"]


def command(name: str) -> str:
    """Returns the path of a linter, beside this Python or on PATH; skips the test without it."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    return found or pytest.skip(f"{name} is not installed")


def check(*argv: object) -> None:
    done = subprocess.run([*map(str, argv)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            yield f"{path.stem}.{name}", job


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, job in jobs():
        for step in job["steps"]:
            yield name, step


def test_there_are_workflows_for_tests_docs_image_trainers_and_wheels() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "image", "tests", "trainers", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends_an_older_run(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert "github.ref" in workflow["concurrency"]["group"]


def test_only_jobs_that_publish_or_propose_may_write() -> None:
    writing = {name: job["permissions"] for name, job in jobs() if "write" in str(job.get("permissions"))}
    assert writing == {
        "docs.publish": {"pages": "write", "id-token": "write"},
        "image.build": {"contents": "read", "packages": "write"},
        "trainers.propose": {"contents": "write", "pull-requests": "write"},
        "wheels.publish": {"id-token": "write"},
    }


def test_jobs_end_and_actions_have_versions() -> None:
    assert all(0 < job["timeout-minutes"] <= 60 for _, job in jobs())
    actions = [step["uses"] for _, step in steps() if "uses" in step]
    assert actions and all(re.fullmatch(r"actions/[\w-]+@v\d+|[\w-]+/[\w/-]+@[0-9a-f]{40}", name) for name in actions)
    checkouts = [step for _, step in steps() if "/checkout@" in step.get("uses", "")]
    assert len(checkouts) == len([*jobs()]) - 2  # publishing needs no sources
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_what_the_workflows_make_the_makefile_has_and_the_script_of_ci_too() -> None:
    makefile = (ROOT / "Makefile").read_text()
    run = {step["run"] for _, step in steps() if "run" in step}
    targets = {match[1] for text in run for match in re.finditer(r"\bmake ([\w-]+)", text)}
    assert all(re.search(rf"^{target}:.*## ", makefile, re.MULTILINE) for target in targets)
    words = " ".join(re.findall(r"\bmake (-.*)", (ROOT / ".ci/run").read_text())).split()
    assert {"check", "browser", "test"} == {word for word in words if not word.startswith("-")} <= targets


def test_the_classifiers_are_the_versions_that_the_tests_run_with() -> None:
    (matrix,) = (job["strategy"]["matrix"]["python"] for name, job in jobs() if name == "tests.tests")
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == matrix and PROJECT["requires-python"] == f">={matrix[0]}"
    (image,) = re.findall(r"^FROM python:(3\.\d+)-", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert image in matrix


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_fields_of_known_kinds(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 2
    for field in fields:
        assert field["type"] in ("input", "textarea") and field["attributes"]["label"]
        assert field.keys() <= {"type", "id", "attributes", "validations"}
    assert any(field.get("validations") == {"required": True} for field in fields)


def test_the_citation_is_of_this_release() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["title"], cited["version"], cited["license"]) == (
        PROJECT["name"], PROJECT["version"], PROJECT["license"],
    )  # fmt: skip
    assert cited["authors"] and cited["message"] and cited["cff-version"] == "1.2.0"
    entry = f"author = {{{{{cited['authors'][0]['name']}}}}}, year = {{2026}}, version = {{{PROJECT['version']}}}"
    assert entry in (ROOT / "README.md").read_text()


def test_no_address_is_invented() -> None:
    for name in PAGES:
        text = (ROOT / name).read_text()
        assert not re.search(r"[\w.+-]+@[\w-]+\.[a-z]{2,}|https?://(?!127\.0\.0\.1)\S+", text), name
    assert "vulnerability" in (ROOT / "SECURITY.md").read_text()


# the image


def instructions() -> list[tuple[str, str]]:
    """Returns the Dockerfile's instructions in order, with their arguments in one line."""
    text = (DEPLOY / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_has_fixed_versions_no_root_and_no_lists() -> None:
    found = instructions()
    images = [rest for name, rest in found if name == "FROM"]
    assert all(re.search(r":[\d.]+[\w.-]*$", image) for image in images)
    last_user = [rest for name, rest in found if name == "USER"][-1]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last_user)
    assert found.index(("USER", last_user)) > max(i for i, (name, _) in enumerate(found) if name == "RUN")
    for _, rest in (item for item in found if item[0] == "RUN" and "apt-get install" in item[1]):
        assert "--no-install-recommends" in rest and rest.endswith("rm -rf /var/lib/apt/lists/*")
    assert not any(name in ("ADD", "MAINTAINER") for name, _ in found)
    assert all(rest.startswith('["') for name, rest in found if name in ("CMD", "ENTRYPOINT"))


def test_packages_are_installed_before_the_sources_are_copied() -> None:
    found = instructions()
    sources = found.index(("COPY", "src src"))
    installs = [i for i, (name, rest) in enumerate(found) if name == "RUN" and "pip install" in rest]
    assert [i < sources for i in installs] == [True, False]
    # A leftover build folder would keep the empty package of the first installation in the second.
    assert all("rm -rf build" in found[i][1] for i in installs) and "--no-deps" in found[installs[1]][1]


def test_the_context_has_what_the_image_copies_and_nothing_else() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]}
    assert ignored[0] == "*" and kept == copied


def test_a_tag_pushes_the_release_that_pyproject_names() -> None:
    push = next(step["run"] for name, step in steps() if name == "image.build" and step.get("name") == "Push")
    assert "${TAG#v}" in push  # v0.3.0 is pushed as 0.3.0, which the manifests name
    assert read("kubernetes/base/kustomization.yaml")["images"][0]["newTag"] == PROJECT["version"]


# linters


def test_actionlint() -> None:
    check(command("actionlint"), "-no-color", *WORKFLOWS)


def test_workflows_fit_the_published_schema() -> None:
    check(command("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)


def test_zizmor_finds_no_weakness_in_the_workflows() -> None:
    check(command("zizmor"), "--offline", "--no-progress", FORGE)


def test_hadolint() -> None:
    check(command("hadolint"), DEPLOY / "Dockerfile")
