"""The search for placements finds Megatron-LM's layout for every family (arXiv 1909.08053, section
3): products that read the residual stream are cut by their outputs, products that write to it by
their inputs, and a block has one sum after each, or one for both where they stand side by side.
"""

import re
from collections import Counter

import pytest
from family_configs import MORE_CONFIGS
from ranks import REFUSED
from support import CONFIGS, make_backbone

from coserve.errors import UnsupportedModelError
from coserve.graph.ir import GraphBuilder
from coserve.graph.layouts import COPIED, PART, WHOLE
from coserve.graph.parallel.search import Search, link_first, place_backbone
from coserve.kernels.cuts import Cut, even_cut
from coserve.kernels.groups.base import Ranks
from coserve.models.local import local_model

# By the last part of a node's name.
COLUMNS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "Wqkv"}
COLUMNS |= {"gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h"}
COLUMNS |= {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba"}
ROWS = {"o_proj", "out_proj", "c_proj", "dense", "down_proj", "fc2", "fc_out", "dense_4h_to_h"}
WHOLE_NODES = {"gate", "router", "shared_expert_gate"}
# Attention and MLP side by side.
PARALLEL = {"gptj", "gpt-neox", "falcon-old", "falcon-new", "falcon-new-one-norm"}
EVERY = [
    (name, size)
    for name in [*CONFIGS, *MORE_CONFIGS]
    for size in (2, 4)
    if (name, size) not in REFUSED
]


def local(name, size, rank=0):
    return local_model(make_backbone(name).architecture, Ranks(rank=rank, size=size))


def kind_of(state):
    return {-2: "column", -1: "row"}[state.dim] if isinstance(state, Cut) else state


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_megatrons_layout_is_found(name, size):
    model = local(name, size)
    architecture = model.architecture
    for layer in range(architecture.num_layers):
        found = model.divided[layer]
        for node in architecture.graphs[layer].nodes:
            if node.op in ("linear", "expert_linear", "route", "route_of_all"):
                last = node.name.rpartition(".")[2]
                expected = "column" if last in COLUMNS else "row" if last in ROWS else WHOLE
                assert last in COLUMNS | ROWS | WHOLE_NODES
                assert kind_of(found.states[node.input["weight"]]) == expected, node.name
        counts = Counter(node.op for node in found.collectives)
        sums = 1 if name in PARALLEL else 2
        norms = {"rank_rms_norm": 2} if name == "olmo2" else {}
        assert counts == {"rank_copy": sums, "rank_sum": sums, **norms}


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2", "falcon-new", "qwen3.5-tied", "opt-350m-style"]
)
def test_tables_and_heads_are_cut_by_the_vocabulary(name):
    model = local(name, 2)
    table = f"{model.architecture.embedding_name}.weight"
    embed, head = model.divided["embed"].states, model.divided["head"].states
    assert embed[table].dim == head["lm_head.weight"].dim == -2
    assert embed[table].local == head["lm_head.weight"].local == 49, "97 tokens, padded"
    assert model.graphs["head"].nodes[-1].op == "rank_gather"


def test_key_heads_that_are_fewer_than_ranks_are_copied():
    found = local("llama", 4).divided[0]
    assert found.states["self_attn.k_proj.weight"].copies == (2, 2)
    assert found.states["self_attn.q_proj.weight"].is_disjoint
    assert found.summed == ("self_attn.k_proj.weight", "self_attn.v_proj.weight"), "in order"


@pytest.mark.parametrize("name", ["phi3", "falcon-new-one-norm"])
def test_the_weights_of_a_fused_projection_are_summed_if_some_of_their_rows_are_copied(name):
    found = local(name, 4).divided[0]
    [fused] = [
        weight
        for weight in found.states
        if re.search(r"(qkv_proj|query_key_value).weight$", weight)
    ]
    assert found.states[fused].copies == (1, 2)
    assert fused in found.summed


@pytest.mark.parametrize(
    ("name", "size"),
    [("gpt2", 4), ("phi3", 4), ("falcon-new", 4), ("gpt-oss", 2), ("qwen3-next", 4)],
)
def test_fused_projections_are_cut_part_by_part(name, size):
    """Every rank's columns of a part are those that it has of the whole part."""
    models = [local(name, size, rank) for rank in range(size)]
    whole = models[0].architecture.graphs[0]
    for node in whole.nodes:
        if node.op == "columns":
            width = whole.spec[node.output["y"]].shape[0]
            states = [model.divided[0].states[node.name] for model in models]
            assert all(state == states[0] for state in states)
            held = {
                column
                for runs in states[0].runs
                for run in runs
                for column in range(run.start, run.stop)
            }
            assert held == set(range(width))
            assert models[0].graphs[0].spec[node.name].shape == (states[0].local,)


def test_a_whole_input_of_a_divided_operator_is_copied_once():
    found = local("gpt-oss", 2).divided[0]
    readers = [
        node.name
        for node in found.graph.nodes
        if "post_attention_layernorm.copy" in node.input.values()
    ]
    assert readers == ["mlp.router", "mlp.experts.gate_up_proj"]
    assert found.states["mlp.router"] is COPIED, "its gradient is a part of a sum as well"
    assert "mlp.router.weight" in found.summed


def test_an_operator_without_layouts_runs_on_whole_tensors():
    b = GraphBuilder()
    x = b.rows("x", 8)
    norm = b.apply(
        "layer_norm",
        "norm",
        {"x": b.linear("wide", x, 16), "weight": b.weight("norm.weight", 16)},
        eps=1e-6,
    )
    graph = b.build(b.linear("narrow", norm, 8))
    found = place_backbone(graph, 2).local(0)
    assert found.states["wide.gather"] is WHOLE
    assert [node.op for node in found.graph.nodes if node.name == "norm"] == ["layer_norm"]


def test_a_part_of_a_sum_is_summed_before_what_is_not_linear():
    b = GraphBuilder()
    x = b.rows("x", 8)
    hidden = b.apply("relu", "inner", {"x": b.linear("up", x, 16)})
    y = b.apply("scale", "scaled", {"x": b.linear("down", hidden, 8)}, factor=2.0)
    graph = b.build(b.apply("relu", "outer", {"x": y}))
    found = place_backbone(graph, 2).local(0)
    assert found.states["down"] is PART
    names = [node.name for node in found.graph.nodes]
    assert names == ["x.copy", "up", "inner", "down", "down.ranks", "scaled", "outer"]


def test_what_moves_nothing_is_no_collective():
    """Ranks take their columns of what all have, or rank 0 alone keeps it, without the others."""
    b = GraphBuilder()
    graph = b.build(b.apply("relu", "y", {"x": b.rows("x", 8)}))
    for wanted, op in ((PART, "rank_first"), (even_cut(8, 2), "rank_take")):
        found = Search(graph, 2, score=link_first, may_take=True).run({"y": (wanted,)})
        assert found is not None
        local_graph = found[1].local(0)
        assert op in [node.op for node in local_graph.graph.nodes]
        assert {node.op for node in local_graph.collectives} <= {"rank_copy"}


def test_the_graphs_of_all_ranks_meet_in_their_collectives():
    for name in ("mpt", "llama", "qwen3.5"):
        graphs = [local(name, 2, rank).graphs for rank in (0, 1)]
        for part in graphs[0]:
            nodes = [
                [(node.name, node.op, node.inputs) for node in each[part].nodes] for each in graphs
            ]
            assert nodes[0] == nodes[1]
            shapes = [
                [(tensor.name, tensor.shape) for tensor in each[part].tensors] for each in graphs
            ]
            assert shapes[0] == shapes[1]


def test_slopes_of_alibi_are_those_of_a_ranks_heads():
    slopes = [
        local("mpt", 2, rank).graphs[0].node["attention"].attribute["alibi_slopes"]
        for rank in (0, 1)
    ]
    assert (
        slopes[0] + slopes[1]
        == make_backbone("mpt").architecture.graphs[0].node["attention"].attribute["alibi_slopes"]
    )


def test_a_refusal_names_the_number_and_what_fits():
    with pytest.raises(
        UnsupportedModelError,
        match=re.escape(
            "llama: 4 heads of attention cannot be divided among 3 ranks; a number of ranks that "
            "fits is 1 or 2 or 4"
        ),
    ):
        local("llama", 3)
