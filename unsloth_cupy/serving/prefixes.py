"""A tree of prefixes: full pages of tokens, which rows that begin alike share."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..inference.page_pools import PagePools, Pages
from ..inference.paged_kv_cache import GONE


class Node:
    """A full page of tokens after the pages of its parents."""

    def __init__(
        self, parent: "Node | None", key: Any, pages: Pages, routes: Sequence[Array] = ()
    ) -> None:
        self.parent, self.key, self.pages = parent, key, pages
        # the experts of each token, if they are noted; copied, as they are parts of whole steps
        self.routes: Any = np.stack(routes) if routes else ()
        self.children: dict[Any, Node] = {}
        self.used = 0  # time of the last use
        self.gone = False  # whether its page was freed


class Prefixes:
    """The pages of earlier rows by their tokens; the least recently used become free first.

    The tree owns each of its pages once, beside the sequences that use it.
    """

    def __init__(self, cache: PagePools) -> None:
        self.cache, self.roots = cache, dict[Any, Node]()
        self.clock = itertools.count(1)

    def root(self, kind: Any) -> Node:
        """Return the node before the first token of rows of a kind, such as with one adapter."""
        return self.roots.setdefault(kind, Node(None, kind, []))

    def longest(self, kind: Any, tokens: Sequence[int]) -> list[Node]:
        """Return the nodes of the full pages that tokens begin with; the last token stays out."""
        page, node, nodes = self.cache.page, self.root(kind), list[Node]()
        now = next(self.clock)
        for start in range(0, (len(tokens) - 1) // page * page, page):
            child = node.children.get(tuple(tokens[start : start + page]))
            if child is None:
                break
            child.used, node = now, child
            nodes.append(child)
        return nodes[: self.cache.usable([node.pages for node in nodes])]

    def add(
        self, node: Node, tokens: Sequence[int], pages: Pages, routes: Sequence[Array] = ()
    ) -> Node:
        """Return the node of a full page after ``node``, which owns each page that it had not."""
        key = tuple(tokens)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, [GONE] * len(pages), routes)
        new = [page if own == GONE else GONE for own, page in zip(child.pages, pages, strict=True)]
        self.cache.hold(new)
        child.pages = [
            page if own == GONE else own for own, page in zip(child.pages, pages, strict=True)
        ]
        child.used = next(self.clock)
        return child

    def _nodes(self) -> Iterator[Node]:
        waiting = [*self.roots.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _unused(self, node: Node, pool: int = 0) -> bool:
        """Return whether no row uses a node's page of a pool."""
        page = node.pages[pool]
        return page != GONE and self.cache.pools[pool].uses[page] == 1

    def unused(self, pool: int = 0) -> int:
        """Return the number of pages of a pool that no row uses."""
        return sum(self._unused(node, pool) for node in self._nodes())

    def free(self, pages: Sequence[int]) -> int:
        """Free up to so many pages of each pool that no row uses; count them.

        The least recently used are first.
        """
        return sum(self._free(pool, count) for pool, count in enumerate(pages))

    def _free(self, pool: int, pages: int) -> int:
        freed, frees = 0, self.cache.pools[pool].frees
        while freed < pages:
            unused = [node for node in self._nodes() if self._unused(node, pool)]
            ends = unused if pool else [node for node in unused if not node.children]
            # Without its page in a window a node still has those of other layers or later tokens.
            ends = ends or (unused if frees else [])
            for node in sorted(ends, key=lambda node: node.used)[: pages - freed]:
                freed += 1
                if pool or node.children:
                    self.cache.pools[pool].release([node.pages[pool]])
                    node.pages[pool] = GONE
                else:
                    self._remove(node)
            if not ends:
                break
        return freed

    def _remove(self, node: Node) -> None:
        """Remove a node without children, and its parents that have no other and no page."""
        empty: Node | None = node
        while empty is not None and empty.parent is not None and not empty.children:
            del empty.parent.children[empty.key]
            empty.gone = True
            self.cache.release(empty.pages)
            empty = empty.parent if empty.parent.pages[:1] == [GONE] else None
