"""A key-value store in memory, for tasks whose outcome is what is stored at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, ToolError
from ..tool import Tool, tool


class KeyValueStore:
    """JSON values by key, kept as JSON text: nobody who gets a value can change the stored one.

    Args:
        items: Value by key, at the start.
        max_items: Keys at any time.
        max_bytes: Bytes of all values together, as JSON.
        max_key_chars: Characters of one key.

    Raises:
        ConfigError: The items break a limit or have no JSON form.
    """

    def __init__(
        self,
        items: Mapping[str, Any] | None = None,
        *,
        max_items: int = 256,
        max_bytes: int = 2**20,
        max_key_chars: int = 255,
    ) -> None:
        self.max_items, self.max_bytes, self.max_key_chars = max_items, max_bytes, max_key_chars
        self._texts: dict[str, str] = {}
        for key, value in (items or {}).items():
            if not isinstance(key, str):
                raise ConfigError(f"items must have strings as keys, got {key!r}")
            try:
                self.set(key, value)
            except ToolError as error:
                raise ConfigError(f"items[{key[:80]!r}]: {error}") from None

    def state(self) -> dict[str, Any]:
        """Return a copy of the values, by key in order."""
        return {key: json.loads(text) for key, text in sorted(self._texts.items())}

    def tools(self) -> list[Tool]:
        """Return `get`, `set`, `delete` and `list_keys`, bound to this store."""
        make = tool(in_memory=True)
        return [make(function) for function in (self.get, self.set, self.delete, self.list_keys)]

    def get(self, key: str) -> Any:
        """Get the value of a key.

        Raises:
            ToolError: There is no such key.
        """
        return json.loads(self._texts[self._existing(key)])

    def set(self, key: str, value: Any) -> dict[str, str]:
        """Set a key, new or not, to a value.

        Args:
            key: The key.
            value: Any JSON value.

        Raises:
            ToolError: A limit is reached, or the value has no JSON form.
        """
        if len(key) > self.max_key_chars:
            raise ToolError(f"the key has {len(key)} characters, at most {self.max_key_chars} are allowed")
        if key not in self._texts and len(self._texts) >= self.max_items:
            raise ToolError(f"there are {len(self._texts)} keys, at most {self.max_items} are allowed")
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ToolError(f"the value has no JSON form: {error}") from None
        total = len(text) + sum(len(other) for name, other in self._texts.items() if name != key)
        if total > self.max_bytes:
            raise ToolError(f"the store is full: {total} bytes, at most {self.max_bytes}")
        self._texts[key] = text
        return {"set": key}

    def delete(self, key: str) -> dict[str, str]:
        """Delete a key and its value.

        Raises:
            ToolError: There is no such key.
        """
        del self._texts[self._existing(key)]
        return {"deleted": key}

    def list_keys(self, prefix: str = "") -> list[str]:
        """List the keys in order.

        Args:
            prefix: Only keys that begin with it.
        """
        return sorted(key for key in self._texts if key.startswith(prefix))

    def _existing(self, key: str) -> str:
        if key not in self._texts:
            raise ToolError(f"there is no key {key[: self.max_key_chars]!r}. See list_keys.")
        return key
