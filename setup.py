"""Makes the package's page of the README, and compiles the kernels; all else stands in pyproject.toml.

On that page links and pictures of the repository lead nowhere by themselves.

The kernels (`guerdon/engine/native`) are no Python modules: one library for each level of instructions, with a name
that no Python's version is part of. They are optional: without a compiler the package is installed without them. They
are compiled with -fopenmp and linked without it, because the OpenMP runtime is the one that PyTorch has loaded.
"""

from __future__ import annotations

import copy
import os
import platform
import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

REPOSITORY = ""
"""The URL at which the repository is public, such as https://github.com/NAME/guerdon; empty as long as it is not."""

_PICTURE = re.compile(r'!\[([^\]]*)\]\(([^)]+)\)|<img src="([^"]+)"[^>]* alt="([^"]*)">')
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#]*)(#[^)]*)?\)")


def page(readme: str, repository: str) -> str:
    """Returns the README with links to the public repository; without one they name the file, as text."""

    def picture(found: re.Match[str]) -> str:
        text, path = found[1] or found[4], found[2] or found[3]
        return f"![{text}]({repository}/raw/HEAD/{path})" if repository else f"*{text}*"

    def link(found: re.Match[str]) -> str:
        text, path, heading = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", path):
            return found[0]
        if not path:  # a heading of the README, which the package's page has without an anchor
            return f"[{text}]({repository}{heading})" if repository else text
        if repository:
            return f"[{text}]({repository}/blob/HEAD/{path}{heading})"
        return text if text == path else f"{text} (`{path}`)"

    return _LINK.sub(link, _PICTURE.sub(picture, readme))


def urls(repository: str) -> dict[str, str]:
    """Returns the package's links; none without a public repository, because no address is invented."""
    paths = {
        "Repository": "",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + path for name, path in paths.items()} if repository else {}


NATIVE = "src/guerdon/engine/native"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-DVW=16"]
LEVELS = {
    "avx512_bf16": [*AVX512, "-mavx512bf16"],
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-DVW=8"],
    "baseline": ["-DVW=4"],
}
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp"]
"""Never -ffast-math: it reorders sums, and it folds the rounding in exp2."""


def kernels() -> list[Extension]:
    """Returns one library for each level of this machine's instructions."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return [
        Extension(
            f"guerdon.engine.native.kernels_{level}",
            [f"{NATIVE}/{name}.cpp" for name in ("attention", "passes")],
            depends=[f"{NATIVE}/vectors.h"],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-Wl,--as-needed"],
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
        if is_x86 or level == "baseline"
    ]


class BuildKernels(build_ext):
    """Builds libraries that are no Python modules."""

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a name without Python's version."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Returns no names: all of C are exported, and there is no PyInit."""
        return []

    def finalize_options(self) -> None:
        """Builds as many libraries at a time as there are cores, unless told otherwise."""
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extension(self, ext: Extension) -> None:
        """Builds one library, its objects in a folder of its own: the others have the same sources."""
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(own, ext)


class KernelsWheel(bdist_wheel):
    """A wheel for a platform, and for any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the wheel's tag."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=page(readme, REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=urls(REPOSITORY),
        ext_modules=kernels(),
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": KernelsWheel},
    )
