"""A tree of prefixes: full pages of tokens, which rows that begin alike share."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..inference.paged_kv_cache import PagedKVCache


class Node:
    """A full page of tokens after the pages of its parents."""

    def __init__(self, parent: "Node | None", key: Any, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[Any, Node] = {}
        self.used = 0  # time of the last use
        self.gone = False  # whether its page was freed


class Prefixes:
    """The pages of earlier rows by their tokens; the least recently used become free first.

    The tree owns each of its pages once, beside the sequences that use it.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache, self.roots = cache, dict[Any, Node]()
        self.clock = itertools.count(1)

    def root(self, kind: Any) -> Node:
        """Return the node before the first token of rows of a kind, such as with one adapter."""
        return self.roots.setdefault(kind, Node(None, kind, -1))

    def longest(self, kind: Any, tokens: Sequence[int]) -> list[Node]:
        """Return the nodes of the full pages that tokens begin with; the last token stays out."""
        page, node, nodes = self.cache.keys.shape[2], self.root(kind), list[Node]()
        now = next(self.clock)
        for start in range(0, (len(tokens) - 1) // page * page, page):
            child = node.children.get(tuple(tokens[start : start + page]))
            if child is None:
                break
            child.used, node = now, child
            nodes.append(child)
        return nodes

    def add(self, node: Node, tokens: Sequence[int], page: int) -> Node:
        """Return the node of a full page after ``node``; a new one owns the page."""
        key = tuple(tokens)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, page)
            self.cache.hold([page])
        child.used = next(self.clock)
        return child

    def _nodes(self) -> Iterator[Node]:
        waiting = [*self.roots.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.parent is not None:
                yield node

    @property
    def unused(self) -> int:
        """The number of pages that no row uses."""
        return sum(self.cache.uses[node.page] == 1 for node in self._nodes())

    def free(self, pages: int) -> int:
        """Free up to so many pages that no row uses, the least recently used first; count them."""
        freed = 0
        while freed < pages:
            ends = [n for n in self._nodes() if not n.children and self.cache.uses[n.page] == 1]
            for node in sorted(ends, key=lambda node: node.used)[: pages - freed]:
                parent: Any = node.parent
                del parent.children[node.key]
                node.gone = True
                self.cache.release([node.page])
                freed += 1
            if not ends:
                break
        return freed
