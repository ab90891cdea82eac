"""A target's cache under one interface, whatever the release of transformers.

What a hybrid target remembers is not only keys and values: each linear-attention layer holds a
convolution state and a recurrent state that are updated in place and cannot be cropped. Going back
therefore means a copy taken beforehand.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dflash_diag.errors import BadInput

_KEYWORDS = ("cache", "past_key_values", "cache_params")

Snapshot = list[dict[str, Any]]
"""One mapping a layer: every attribute of its cache, as it was."""


class CacheAdapter:
    """Makes, passes, copies and restores the caches of one model.

    Raises
    ------
    BadInput
        The model's forward takes no cache.
    """

    def __init__(self, model: Any) -> None:
        parameters = inspect.signature(model.forward).parameters
        self.keyword = next((k for k in _KEYWORDS if k in parameters), "")
        if not self.keyword:
            raise BadInput(f"{type(model).__name__} takes no cache", "a causal language model")
        self.config = model.config

    def new(self) -> Any:
        """An empty cache."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def arguments(self, cache: Any) -> dict[str, Any]:
        """Keyword arguments that make a forward read and update ``cache``."""
        return {self.keyword: cache, "use_cache": True}

    def snapshot(self, cache: Any) -> Snapshot:
        """Everything that the cache holds now.

        Keys and values are kept by reference, because a dynamic cache replaces them at every step
        and never writes into them; all other tensors are cloned.
        """
        return [
            {
                name: value if name in ("keys", "values") else _clone(value)
                for name, value in vars(layer).items()
            }
            for layer in cache.layers
        ]

    def restore(self, cache: Any, snapshot: Snapshot) -> None:
        """Put a cache back as it was when ``snapshot`` was taken; the snapshot stays usable."""
        for layer, saved in zip(cache.layers, snapshot, strict=True):
            for name, value in saved.items():
                setattr(layer, name, value if name in ("keys", "values") else _clone(value))


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _clone(item) for key, item in value.items()}
    return value
