"""The adapters that requests can name."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from tokenpod.core.adapters import AdapterKind
from tokenpod.core.messages import AdapterFacts, AdapterList
from tokenpod.core.requests import Request
from tokenpod.service.calls.errors import NotFound

#: Names that an error lists, and characters of one that it repeats.
_MOST_LISTED, _MOST_SHOWN = 20, 100


class Adapters:
    """Adapters by name, as the engine has said last.

    Args:
        slots: LoRA adapters that running sequences can have at once.
        facts: of those that are loaded.
        changing: others may be loaded while serving.
    """

    def __init__(
        self, slots: int, facts: Iterable[AdapterFacts] = (), *, changing: bool = False
    ) -> None:
        self.slots = slots
        self._changing = changing
        self._named: dict[str, AdapterFacts] = {}
        self.take(facts)

    def take(self, facts: Iterable[AdapterFacts]) -> None:
        """The adapters that can be used from now on."""
        self._named = {each.name: each for each in facts}

    def hear(self, told: AdapterList) -> None:
        """The engine says which there are."""
        self.take(told.loaded)

    def remove(self, name: str) -> None:
        """Nobody finds this adapter any more."""
        self._named.pop(name, None)

    @property
    def taken(self) -> bool:
        """Whether requests can have adapters at all."""
        return self.slots > 0 or self._changing or bool(self._named)

    @property
    def loaded(self) -> list[AdapterFacts]:
        """All of them, by name."""
        return [self._named[name] for name in sorted(self._named)]

    def get(self, name: str | None) -> AdapterFacts | None:
        """The adapter of this name; None: there is none."""
        return self._named.get(name or "")

    def find(self, name: str) -> AdapterFacts | None:
        """The adapter that a client names; None: it names none. Raises NotFound."""
        found = self.get(name)
        if name and found is None:
            shown = f"{name[:_MOST_SHOWN]}..." if len(name) > _MOST_SHOWN else name
            problem = f"there is no adapter {shown!r}; this server has {self._list()}"
            raise NotFound("adapter", shown, problem)
        return found

    def _list(self) -> str:
        names = sorted(self._named)
        first = ", ".join(map(repr, names[:_MOST_LISTED]))
        more = len(names) - _MOST_LISTED
        return f"{first} and {more} more" if more > 0 else first or "none"


def with_adapter(request: Request, adapter: AdapterFacts | None) -> Request:
    """The same request with an adapter, if it has one.

    Its cached prefixes are shared with requests of the same adapter alone, and of this version. One
    that is fused into the model is every request's.
    """
    if adapter is None or not adapter.number:
        return request
    return structs.replace(
        request,
        adapter=adapter.number,
        salt=f"adapter {adapter.digest}\0{request.salt}",
        virtual_tokens=adapter.virtual_tokens,
        virtual_kv=adapter.kind is AdapterKind.PREFIX,
    )
