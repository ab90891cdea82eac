"""Names that no checkpoint needs and that a hostile pickle uses to run code.

Nothing in a pickle is ever called here, so these names could do no harm; a file that contains one
is still refused, because somebody will load it elsewhere with something that calls.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Refused wherever the name occurs in a dotted path: ``posix.system``, but also ``pkg.os.system``.
_MODULES = _words(
    "os posix nt subprocess sys importlib runpy shutil socket pty builtins __builtin__ __builtins__"
)
# Refused as the outermost package only, since they are ordinary words in other people's packages.
_PACKAGES = _words(
    "_aix_support _ctypes _frozen_importlib _imp _pickle _posixsubprocess _socket bdb cPickle code "
    "codeop commands ctypes imp marshal nturl2path pdb pickle pip popen2 pydoc timeit "
    "webbrowser"
)
_BUILTINS = _words(
    "__import__ apply breakpoint compile delattr eval exec execfile exit getattr globals help "
    "input locals open quit raw_input reload setattr vars"
)
# Loaders that would run a second pickle hidden in bytes, and file openers outside builtins.
_FUNCTIONS = _words(
    "torch.load torch.storage._load_from_bytes torch.serialization.load torch.hub.load "
    "torch.jit.load numpy.load joblib.load io.open io.open_code _io.open _io.open_code "
    "_io.FileIO io.FileIO codecs.open types.FunctionType types.CodeType"
)


def is_unsafe(module: str, name: str) -> bool:
    """Whether a pickle that names ``module.name`` is to be refused."""
    modules, names = module.split("."), name.split(".")
    if modules[0] in {"builtins", "__builtin__"} and len(modules) == 1:
        return bool(_BUILTINS & set(names)) or _walks_dunders(names)
    return (
        bool(_MODULES & {*modules, *names})
        or modules[0] in _PACKAGES
        or f"{module}.{name}" in _FUNCTIONS
        or names[-1] in {"__builtins__", "__import__"}
        or _walks_dunders(names)
    )


def _walks_dunders(names: list[str]) -> bool:
    """``Class.__subclasses__`` and the like: a dotted name that goes through an internal."""
    return len(names) > 1 and any(n.startswith("__") and n.endswith("__") for n in names)
