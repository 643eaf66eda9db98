"""The graph of groups: paths around a pair and the order that merges keep, against brute force."""

from __future__ import annotations

import random

from deuteron.ir import expr as E
from deuteron.ir.index import Axis, Index
from deuteron.ir.program import Compute, Input, Output, Program, contiguous, memory_of
from deuteron.schedule.dag import Dag, Node
from deuteron.schedule.group import Group, group_of_one
from deuteron.schedule.order import Order


def of_edges(count: int, edges: list[tuple[int, int]]) -> Dag:
    """One computation per node, nothing read: the edges are all there is."""
    axis = Axis("d0", 4)
    dag = Dag({}, {}, {}, {})
    for k in range(count):
        body = E.literal(float(k), "f32")
        c = Compute(f"t{k}", (axis,), body, contiguous((axis.extent,), "f32"))
        dag.add(group_of_one(c, k), k, k)
        dag.home[c.name] = k
    for a, b in edges:
        dag.edge(a, b)
    return dag


def reachable(dag: Dag, start: int) -> set[int]:
    reached: set[int] = set()
    todo = list(dag.nodes[start].after)
    while todo:
        k = todo.pop()
        if k not in reached:
            reached.add(k)
            todo += dag.nodes[k].after
    return reached


def through_others(dag: Dag, a: int, b: int) -> set[int]:
    """Nodes on a path from a to b that are neither."""
    down = {x for n in dag.nodes[a].after - {b} for x in (n, *reachable(dag, n))}
    return {x for x in down - {a, b} if b in reachable(dag, x)}


def ordered(dag: Dag) -> bool:
    label = dag.order_of.label
    links = [(n.id, k) for n in dag.nodes.values() for k in n.after]
    return label.keys() == dag.nodes.keys() and all(label[a] < label[b] for a, b in links)


def both(a: Node, b: Node) -> Group:
    assert isinstance(a.content, Group) and isinstance(b.content, Group)
    return Group(a.content.space, (*a.content.members, *b.content.members))


def test_a_writer_waits_for_readers_and_readers_for_it() -> None:
    """x is read, overwritten, and read by its new name: each after the one before."""
    axis = Axis("d0", 4)
    lay = contiguous((axis.extent,), "f32")

    def read(name: str, at: Index) -> E.Expr:
        return E.load(name, (at,), "f32")

    turned = Compute("turned", (axis,), read("x", 3 - axis.index), lay)
    write = Compute("new", (axis,), E.op("neg", read("x", axis.index)), lay, "x", (axis.index,))
    late = Compute("late", (axis,), read("new", 3 - axis.index), lay)
    defs = (Input("x", lay, 0), turned, write, late)
    outputs = tuple(Output(n, lay.shape, lay.strides) for n in ("turned", "late"))
    program = Program(defs, outputs)
    computes = {c.name: c for c in (turned, write, late)}
    dag = Dag.of(program, computes, memory_of(program))
    first, second, third = (dag.nodes[dag.home[n]] for n in ("turned", "new", "late"))
    assert second.id in first.after, "the overwriter waits for who reads the old value"
    assert third.id in second.after


def test_merges_of_random_graphs_keep_the_order_and_see_every_cycle() -> None:
    merged = refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        count = rng.randrange(3, 40)
        share = rng.choice((0.03, 0.1, 0.3))
        pairs = [(a, b) for b in range(count) for a in range(b) if rng.random() < share]
        dag = of_edges(count, pairs)
        for _ in range(3 * count):
            if len(dag.nodes) < 2:
                break
            a, b = rng.sample(sorted(dag.nodes), 2)
            expected = through_others(dag, a, b) | through_others(dag, b, a)
            between = dag.path_around(dag.nodes[a], dag.nodes[b])
            if expected:
                assert between is not None and between.id in expected
                refused += 1
                continue
            assert between is None
            one, two = dag.nodes[a], dag.nodes[b]
            dag.merge(one, two, both(one, two))
            assert ordered(dag)
            assert len(list(dag.order())) == len(dag.nodes)
            merged += 1
            if rng.random() < 0.1:
                dag.remove(dag.nodes[rng.choice(sorted(dag.nodes))])
                assert ordered(dag)
    assert merged > 500 and refused > 200


def test_a_path_of_ten_thousand_nodes_is_found() -> None:
    count = 10_000
    dag = of_edges(count, [(k, k + 1) for k in range(count - 1)] + [(0, count - 1)])
    assert dag.path_around(dag.nodes[0], dag.nodes[count - 1]) is not None


def test_order_against_a_list() -> None:
    rng = random.Random(0)
    order, expected = Order(), [0]
    order.append(0)
    for k in range(1, 600):
        place = rng.choice((None, expected[-1], expected[0], expected[0], rng.choice(expected)))
        order.insert(k, place)
        expected.insert(0 if place is None else expected.index(place) + 1, k)
        if rng.random() < 0.2:
            gone = rng.choice(expected)
            order.remove(gone)
            expected.remove(gone)
        if len(expected) > 4 and rng.random() < 0.1:
            some = rng.sample(expected, 3)
            rest = [x for x in expected if x not in some]
            after = rng.choice((None, rng.choice(rest)))
            at = 0 if after is None else rest.index(after) + 1
            moved = [x for x in expected if x in some]
            expected = [*rest[:at], *moved, *rest[at:]]
            order.move(some, after)
        assert sorted(order.label, key=order.label.__getitem__) == expected


def test_labels_run_out_and_are_made_anew() -> None:
    order = Order()
    order.append(0)
    order.append(1)
    for k in range(2, 200):
        order.insert(k, 0)
    assert sorted(order.label, key=order.label.__getitem__) == [0, *range(199, 1, -1), 1]
