"""A training step from ``FILE.py:FUNC``: runs the file, as whoever names it wants."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from dflash_diag import storage
from dflash_diag.errors import BadInput
from dflash_diag.training_audit.calling import _apart, _named
from dflash_diag.training_audit.material import Step


def load_step(spec: str) -> Step:
    """The function that ``FILE.py:FUNC`` names.

    The file's folder is importable while it runs, and afterwards, for what it imports late.

    Raises
    ------
    BadInput
        No such file or function, or the file cannot be run: what it raised, in one line.
    """
    file, colon, name = spec.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not colon or not path.is_file():
        raise BadInput(f"--step {spec}", "FILE.py:FUNC, a function in a file")
    module_name = f"dflash_diag_step_{storage.content_key(str(path))[:12]}"
    found = importlib.util.spec_from_file_location(module_name, path)
    if found is None or found.loader is None:
        raise BadInput(f"--step {spec}", "a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses and pickles look themselves up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        with _apart():
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        said = _named(error).removeprefix("it ")
        raise BadInput(
            f"{path.name} cannot be run: {said}", "a file that Python can run"
        ) from error
    step = getattr(module, name, None)
    if not callable(step):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise BadInput(f"{path.name} has no function {name}", f"one of {', '.join(names[:12])}")
    layers = getattr(step, "layers", None)
    if layers is not None and not (
        isinstance(layers, tuple | list) and all(isinstance(i, int) for i in layers)
    ):
        raise BadInput(f"{name}.layers is {layers!r}", "a list of layer ids")
    return step
