"""The trie of served prefixes: which token sequences exist, and in which tier their KV is.

A node is *hot* (it owns device slots), *cold* (it owns views of encoded blocks and no slots), or *replay* (tokens only,
kept for its statistics). A hot node may own views too: then evicting it costs nothing. Invariants, kept by
construction and checked by :meth:`Trie.check`:

- the parent of a hot node is hot; the parent of a cold node is hot or cold (a restore needs the whole prefix);
- views, where a node has any, cover exactly its tokens;
- a locked node is hot and so are its ancestors; ``lock_count`` never grows downwards.

No SGLang and no torch here: slots are any sequence that slices. Time is a logical clock, one tick per operation, so
that every rank sees the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from sglang_plt.blocks import View, split_views
from sglang_plt.keys import Key
from sglang_plt.policy import EvictionOrder, EvictionQueue


class Node:
    """One edge of the trie with its payload. ``start`` is the absolute position of its first token."""

    __slots__ = (
        "children",
        "created",
        "event_hash_value",
        "hash_value",
        "hit_count",
        "hot_children",
        "id",
        "key",
        "last_access",
        "lock_count",
        "lossy",
        "parent",
        "pin_count",
        "priority",
        "queue",
        "queue_stamp",
        "resident_children",
        "slots",
        "start",
        "views",
    )

    def __init__(self, id: int, parent: Node | None, key: Key, start: int, now: int, priority: int):
        self.id = id
        self.parent = parent
        self.key = key
        self.start = start
        self.children: dict[Any, Node] = {}
        self.slots: Any = None
        self.views: list[View] = []
        self.lossy = False  # the slots hold decoded values: never encode them again
        self.lock_count = 0  # running requests that read the slots
        self.pin_count = 0  # restores in flight that read the views
        self.hot_children = 0
        self.resident_children = 0
        self.last_access = now
        self.created = now
        self.hit_count = 0
        self.priority = priority
        self.queue: EvictionQueue | None = None
        self.queue_stamp = 0
        self.hash_value: list[str] | None = None
        self.event_hash_value: list[str] | None = None

    def __len__(self) -> int:
        return self.key.length

    def __repr__(self) -> str:
        return f"Node(id={self.id}, start={self.start}, len={len(self)}, {self.tier}, locks={self.lock_count})"

    @property
    def hot(self) -> bool:
        return self.slots is not None

    @property
    def cold(self) -> bool:
        return self.slots is None and bool(self.views)

    @property
    def resident(self) -> bool:
        return self.slots is not None or bool(self.views)

    @property
    def tier(self) -> str:
        return "hot" if self.hot else "cold" if self.views else "replay"

    @property
    def stop(self) -> int:
        """Absolute position behind the last token."""
        return self.start + self.key.length


SlotReader = Callable[[int, int], Any]
"""``read(start, stop)`` returns an owned copy of the slots of positions ``[start, stop)`` of the inserted sequence."""


class Trie:
    """Match, insert, split, lock and tier changes over :class:`Node`; sizes in tokens.

    Args:
        page_size: tokens of the allocation unit; nodes start and end on page boundaries.
        order: eviction order of the hot tier; the cold and replay tiers use the same.
    """

    def __init__(self, page_size: int, order: EvictionOrder):
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.order = order
        self.on_split: Callable[[Node, Node, int], None] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything. Handles of earlier nodes are void."""
        self.clock = 0
        self._next_id = 0
        self.hot_queue = EvictionQueue(self.order)
        self.cold_queue = EvictionQueue(self.order)
        self.replay_queue = EvictionQueue(self.order)
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.cold_tokens = 0
        self.replay_tokens = 0
        self.num_nodes = 0
        self.root = Node(self._new_id(), None, Key(array("q")), 0, 0, -(1 << 62))
        self.root.slots = ()
        self.root.lock_count = 1

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def tick(self) -> int:
        """Advance the logical clock; once per operation."""
        self.clock += 1
        return self.clock

    # -- lookup ---------------------------------------------------------------------------------------------------

    def _edge(self, node: Node, key: Key, offset: int) -> Any:
        page = key.page_at(offset, self.page_size)
        return (key.namespace, page) if node.parent is None and key.namespace is not None else page

    def match(self, key: Key) -> tuple[Node, Node]:
        """Longest resident prefix of ``key``.

        A node that is matched in part is split at the end of the match. Access times of the path are refreshed.

        Returns:
            (last hot node, last resident node): the second is the first or lies below it; ``node.stop`` is the length
            of the match.
        """
        now = self.tick()
        node = hot = self.root
        node.last_access = now
        page_size = self.page_size
        offset, length = 0, key.aligned_len(page_size)
        while offset < length:
            child = node.children.get(key.page_at(offset, page_size) if offset else self._edge(node, key, 0))
            if child is None or (child.slots is None and not child.views):
                break
            matched = child.key.common_len(key, offset, length, page_size)
            if matched < child.key.length:
                child = self.split(child, matched)
            child.last_access = now
            if child.queue is not None:
                child.queue.add(child)
            node = child
            if child.slots is not None:
                hot = child
            offset += matched
        return hot, node

    def insert(
        self,
        key: Key,
        read_slots: SlotReader,
        *,
        priority: int = 0,
        counted_len: int = 0,
        on_new: Callable[[Node], None] | None = None,
    ) -> tuple[int, Node]:
        """Insert ``key``; its rows are in the slots that ``read_slots`` names.

        Nodes that are already hot keep their slots. Cold and replay nodes on the path adopt the inserted slots, since
        those hold freshly computed rows; a node without views behind the path is created for the rest.

        Args:
            counted_len: nodes that end at or before this position were counted as a hit before.
            on_new: called for every node that became hot, root to leaf.

        Returns:
            (tokens of the prefix that was hot before, last node): slots of positions below the first are duplicates.
        """
        now = self.tick()
        node = self.root
        node.last_access = now
        node.priority = max(node.priority, priority)
        page_size = self.page_size
        offset, length = 0, key.aligned_len(page_size)
        hot_len = 0
        while offset < length:
            child = node.children.get(key.page_at(offset, page_size) if offset else self._edge(node, key, 0))
            if child is None:
                break
            matched = child.key.common_len(key, offset, length, page_size)
            if matched < child.key.length:
                child = self.split(child, matched)
            if child.slots is None:
                if not child.views:
                    child.created, child.hit_count, child.priority = now, 0, priority
                self.set_hot(child, read_slots(offset, offset + matched), lossy=False)
                if on_new is not None:
                    on_new(child)
            else:
                hot_len = offset + matched
            if child.priority < priority:
                child.priority = priority
            offset += matched
            if offset > counted_len:
                child.hit_count += 1
            child.last_access = now
            if child.queue is not None:
                child.queue.add(child)
            node = child
        if offset < length:
            child = Node(self._new_id(), node, key[offset:length], offset, now, priority)
            child.hit_count = 1 if length > counted_len else 0
            node.children[self._edge(node, key, offset)] = child
            self.num_nodes += 1
            self.replay_tokens += len(child)
            self.set_hot(child, read_slots(offset, length), lossy=False)
            if on_new is not None:
                on_new(child)
            node = child
        return hot_len, node

    def split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens; returns the new upper part, ``node`` becomes the lower part."""
        parent = node.parent
        assert parent is not None
        assert 0 < length < len(node.key)
        assert length % self.page_size == 0
        upper = Node(self._new_id(), parent, node.key[:length], node.start, self.clock, node.priority)
        upper.last_access = node.last_access
        upper.hit_count = node.hit_count
        upper.lock_count = node.lock_count
        upper.pin_count = node.pin_count
        upper.lossy = node.lossy
        parent.children[self._edge(parent, node.key, 0)] = upper
        upper.views, node.views = split_views(node.views, length)
        if node.slots is not None:
            upper.slots, node.slots = node.slots[:length], node.slots[length:]
        if self.on_split is not None:
            self.on_split(upper, node, length)
        node.key = node.key[length:]
        node.start += length
        node.parent = upper
        upper.children[self._edge(upper, node.key, 0)] = node
        upper.hot_children = int(node.slots is not None)
        upper.resident_children = int(node.resident)
        self.num_nodes += 1
        return upper

    # -- tiers ----------------------------------------------------------------------------------------------------

    def set_hot(self, node: Node, slots: Any, *, lossy: bool) -> None:
        """Give a cold or replay node device slots (its parent must be hot)."""
        assert node.slots is None
        assert len(slots) == len(node.key), (len(slots), len(node.key))
        parent = node.parent
        assert parent is not None
        assert parent.slots is not None
        self._uncount(node)
        if not node.views:
            parent.resident_children += 1
        parent.hot_children += 1
        node.slots = slots
        node.lossy = lossy
        self._count(node)
        self._requeue(parent)
        self._requeue(node)

    def clear_hot(self, node: Node) -> Any:
        """Take the device slots from an unlocked node without hot children; returns them."""
        assert node.slots is not None
        assert node.lock_count == 0
        assert node.hot_children == 0
        assert node.views or node.resident_children == 0, "drop the cold subtree first"
        parent = node.parent
        assert parent is not None
        self._uncount(node)
        slots, node.slots, node.lossy = node.slots, None, False
        parent.hot_children -= 1
        if not node.views:
            parent.resident_children -= 1
        self._count(node)
        self._requeue(node)
        self._requeue(parent)
        return slots

    def set_views(self, node: Node, views: list[View]) -> None:
        """Give a hot node the views of its encoded rows."""
        assert node.slots is not None
        assert not node.views
        assert sum(len(view) for view in views) == len(node.key)
        node.views = views

    def clear_views(self, node: Node) -> list[View]:
        """Take the views from a node; the caller releases their blocks. A cold node must have no resident children."""
        assert node.views
        assert node.slots is not None or node.resident_children == 0
        self._uncount(node)
        views, node.views = node.views, []
        if node.slots is None:
            assert node.parent is not None
            node.parent.resident_children -= 1
        self._count(node)
        self._requeue(node)
        if node.parent is not None:
            self._requeue(node.parent)
        return views

    def remove(self, node: Node) -> None:
        """Delete a replay node without children."""
        parent = node.parent
        assert parent is not None
        assert not node.resident
        assert not node.children
        if node.queue is not None:
            node.queue.discard(node)
        del parent.children[self._edge(parent, node.key, 0)]
        self.replay_tokens -= len(node)
        self.num_nodes -= 1
        node.parent = None
        self._requeue(parent)

    # -- locks and pins -------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> int:
        """Protect the slots of ``node`` and its ancestors; returns the tokens that became protected."""
        locked = 0
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            if walk.lock_count == 0:
                assert walk.slots is not None, f"cannot lock {walk}"
                locked += len(walk.key)
                walk.lock_count = 1
                if walk.queue is not None:
                    walk.queue.discard(walk)
            else:
                walk.lock_count += 1
            walk = walk.parent
        assert walk is self.root, "the node is of another tree"
        self.evictable_tokens -= locked
        self.protected_tokens += locked
        return locked

    def unlock(self, node: Node) -> int:
        """Undo one :meth:`lock`; returns the tokens that became evictable."""
        freed = 0
        walk: Node | None = node
        while walk is not None and walk.parent is not None:
            assert walk.lock_count > 0, f"unlock of an unlocked {walk}"
            walk.lock_count -= 1
            if walk.lock_count == 0:
                freed += len(walk.key)
                if walk.hot_children == 0:
                    self._requeue(walk)
            walk = walk.parent
        assert walk is self.root, "the node is of another tree"
        self.evictable_tokens += freed
        self.protected_tokens -= freed
        return freed

    def pin(self, node: Node) -> None:
        """Keep the views of ``node`` and its ancestors from being dropped."""
        walk: Node | None = node
        while walk is not None:
            walk.pin_count += 1
            if walk.queue is self.cold_queue:
                walk.queue.discard(walk)
            walk = walk.parent

    def unpin(self, node: Node) -> None:
        """Undo one :meth:`pin`."""
        walk: Node | None = node
        while walk is not None:
            assert walk.pin_count > 0
            walk.pin_count -= 1
            if walk.pin_count == 0:
                self._requeue(walk)
            walk = walk.parent

    # -- inspection -----------------------------------------------------------------------------------------------

    def path(self, node: Node) -> list[Node]:
        """Nodes from below the root to ``node``."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def nodes(self) -> Iterator[Node]:
        """All nodes below the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def _count(self, node: Node, sign: int = 1) -> None:
        tokens = sign * node.key.length
        if node.slots is not None:
            if node.lock_count:
                self.protected_tokens += tokens
            else:
                self.evictable_tokens += tokens
        elif node.views:
            self.cold_tokens += tokens
        else:
            self.replay_tokens += tokens

    def _uncount(self, node: Node) -> None:
        self._count(node, -1)

    def _requeue(self, node: Node) -> None:
        """Put ``node`` into the one queue that its state belongs to, or into none."""
        queue: EvictionQueue | None = None
        if node.parent is None:
            return
        if node.slots is not None:
            if node.hot_children == 0 and node.lock_count == 0:
                queue = self.hot_queue
        elif node.views:
            if node.resident_children == 0 and node.pin_count == 0:
                queue = self.cold_queue
        elif not node.children:
            queue = self.replay_queue
        if node.queue is not queue:
            if node.queue is not None:
                node.queue.discard(node)
            if queue is not None:
                queue.add(node)

    def check(self) -> None:
        """Verify every invariant of the module docstring and every counter; slow, for tests."""
        from sglang_plt.trie_check import check_trie

        check_trie(self)
