import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from tests.internals import find_blocks, find_roots


class Block(nn.Module):
    def __init__(self, experts=0):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(Block() for _ in range(experts))

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    def __init__(self, *layers, **more):
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.layers = nn.ModuleList(layers)
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x):
        return x


def names(blocks):
    return [type(block).__name__ for block in blocks]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(Block(), Block()), ["Block"] * 2),
        (Model(Block()), []),  # stands there once
        (Model(Block(experts=2), Block(experts=2)), ["Block"] * 2),  # not the experts again
        (Model(nn.Linear(8, 8), nn.Linear(8, 8)), []),  # no modules of their own
        (Model(nn.Identity(), nn.Identity()), []),
        (nn.Sequential(nn.Linear(8, 8), Block(), Block()), ["Block"] * 2),
        (Model(nn.ModuleList([Block(), Block()])), ["Block"] * 2),  # a list has no forward
        (nn.Transformer(8, 2, 1, 2, batch_first=True), ["TransformerDecoderLayer"] * 2),
    ],
    ids=range(8),
)
def test_blocks_are_repeated_modules_of_a_list(model, expected):
    assert names(find_blocks(model)) == expected


def test_a_block_that_stands_in_a_list_twice_is_one():
    block = Block()
    assert find_blocks(Model(block, block)) == [block]


@pytest.mark.parametrize("wrapped", [False, True])
def test_blocks_of_hugging_face_models_are_those_that_they_declare(wrapped):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16))
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=2, vocab_size=16))
    for model, expected in ((gpt2, ["GPT2Block"] * 2), (t5, ["T5Block"] * 4)):
        outer = Model(Block(), Block(), model=model) if wrapped else model
        assert names(find_blocks(outer)) == expected


def test_blocks_by_class_or_name():
    model = Model(Block(experts=2), nn.Linear(8, 8))
    assert find_blocks(model, ["Block"]) == [model.layers[0]]
    assert names(find_blocks(model, [nn.Embedding, "Block"])) == ["Embedding", "Block"]
    with pytest.raises(ValueError, match=r"blocks=\('Blok',\): Model has no module of class Blok"):
        find_blocks(model, ["Blok"])


def test_roots_are_children_that_hold_every_parameter():
    first, second = Model(Block(), Block()), Block()
    outer = nn.Module()
    outer.first, outer.second, outer.metric = first, second, nn.Identity()
    assert find_roots(outer) == [first, second]
    second.up.weight = first.layers[0].up.weight  # shared
    assert find_roots(outer) == [outer]


def test_a_module_with_parameters_or_lists_of_its_own_is_its_own_root():
    model = Model(Block(), Block())
    assert find_roots(model) == [model]  # self.layers has no forward
    outer = nn.Module()
    outer.model, outer.scale = Block(), nn.Parameter(model.embed.weight.detach())
    assert find_roots(outer) == [outer]
