"""Makes a function a command: each parameter is a required flag."""

import argparse
import inspect
from collections.abc import Callable


def run(function: Callable[..., None]) -> None:
    """Calls the function with the values of the command line."""
    parser = argparse.ArgumentParser(description=function.__doc__)
    for name, parameter in inspect.signature(function).parameters.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=parameter.annotation, required=True)
    function(**vars(parser.parse_args()))
