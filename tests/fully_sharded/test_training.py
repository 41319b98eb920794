"""Training steps of models that are sharded over the towers: the numbers of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirrored
from tests.support.jobs import launch, seeded, text_of, towers
from tests.support.programs import run_program
from tests.support.steps import averaging_step

EXAMPLES, BATCH = 22, 5
"""The last batch has two examples, so some of three or four towers have none."""


EXACT = 1e-12 if torch.__version__ >= "2.13" else 1e-8
"""torch 2.9 adds the 1e-6 of ``clip_grad_norm_`` to each tower's part of the norm."""


class Block(nn.Module):
    def __init__(self, width: int, recomputes: bool = False) -> None:
        super().__init__()
        self.norm, self.recomputes = nn.LayerNorm(width), recomputes
        self.wide, self.back = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self._added, x, use_reentrant=False) if self.recomputes else self._added(x))

    def _added(self, x: Tensor) -> Tensor:
        added: Tensor = self.back(F.gelu(self.wide(self.norm(x))))
        return added


class Tied(nn.Module):
    """Blocks between an embedding and a head that share a weight."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.blocks = nn.ModuleList(Block(6, recomputes) for _ in range(3))
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def mlp() -> nn.Module:
    layers = [nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 12)]
    layers[0].weight.requires_grad_(False)
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, bias=False),
        nn.BatchNorm2d(2), nn.Flatten(),
        nn.Linear(32, 12),
    )  # fmt: skip


def data_for(model: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(12, (EXAMPLES,), generator=generator)
    shapes = {"mlp": (EXAMPLES, 7), "cnn": (EXAMPLES, 1, 8, 8)}
    if model in shapes:
        return torch.randn(shapes[model], generator=generator).double(), labels
    return torch.randint(12, (EXAMPLES, 4), generator=generator), labels


MODELS: dict[str, tuple[Callable[[], nn.Module], list[type[nn.Module]]]] = {
    "mlp": (mlp, [nn.Linear]),
    "cnn": (cnn, [nn.Conv2d]),
    "tied": (Tied, [Block]),
    "recomputed": (functools.partial(Tied, recomputes=True), [Block]),
}

Way = Callable[[mirrored.Strategy, nn.Module, torch.optim.Optimizer, Tensor, Tensor], Tensor]


def plainly(strategy: Any, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def accumulated(strategy: Any, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    def losses() -> Tensor:
        return mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))

    optimizer.zero_grad()
    with strategy.no_sync():
        (losses() / 4).backward()
    loss = losses() * 0.75
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(
    strategy: mirrored.Strategy, name: str, shards: bool = True, way: Way = plainly, epochs: int = 2, meta: bool = False
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Losses, parameters and buffers."""
    make, units = MODELS[name]
    torch.set_default_dtype(torch.float64)
    with strategy.scope(sync_batch_norm=name == "cnn"), torch.device("meta" if meta else "cpu"):
        model = seeded(make)
    if shards:
        torch.manual_seed(3)
        assert strategy.shard(model, units) is model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    data = strategy.distribute_dataset(data_for(name), BATCH, shuffle=True)
    losses = []
    for _ in range(epochs):
        for batch in data:
            losses.append(strategy.reduce("sum", strategy.run(way, args=(strategy, model, optimizer, *batch))))
            schedule.step()
    strategy.check_mirrored()
    return losses, [whole(p) for p in model.parameters()], list(model.buffers())


CASES = [
    *((name, count, plainly) for name in MODELS for count in (2, 3, 4)),
    *(("tied", count, accumulated) for count in (2, 3)),
]


@pytest.mark.parametrize(("name", "count", "way"), CASES)
def test_the_numbers_are_those_of_one_device(name: str, count: int, way: Way) -> None:
    [expected] = towers(train, name, False, way, count=1)
    for found in towers(train, name, True, way, count=count):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_first_values_do_not_depend_on_the_number_of_towers() -> None:
    [expected] = towers(train, "tied", True, plainly, 1, True, count=1)
    for found in towers(train, "tied", True, plainly, 1, True, count=3):
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def memory(strategy: mirrored.Strategy) -> tuple[int, int, int]:
    """The numbers of elements that a tower holds, of the model, and of the largest unit."""
    with strategy.scope(), torch.device("meta"):
        model = nn.Sequential(*(Block(32) for _ in range(6)))
    total, unit = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model[0].parameters())
    strategy.shard(model, [Block])
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    strategy.run(step, args=(torch.randn(4, 32),))
    states = [value for state in optimizer.state.values() for value in (state["exp_avg"], state["exp_avg_sq"])]
    held = [p.to_local() if hasattr(p, "to_local") else p for p in (*model.parameters(), *states)]
    held += [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return sum(tensor.numel() for tensor in held), 4 * total, unit


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_tower_holds_its_part(count: int) -> None:
    for held, total, unit in towers(memory, count=count):
        assert held <= 1.1 * total / count + unit


HOSTS = """
import json, os, sys
import torch
from torch import nn
import mirrored

towers = 2
if "uneven" in sys.argv:  # two towers on the first worker, one on the second
    towers -= json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = mirrored.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"][:towers], seed=0)
torch.manual_seed(0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
strategy.shard(model, [nn.Linear])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.arange(21.0).double().view(7, 3) / 20

def step(x):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(model(x).square()[:, 0])
    loss.backward()
    optimizer.step()
    return loss.detach()

for _ in range(2):
    for batch in strategy.distribute_dataset(x, 5):
        loss = strategy.reduce("sum", strategy.run(step, args=(batch,)))
strategy.check_mirrored()
checkpoints = mirrored.CheckpointManager(strategy, sys.argv[1], {"model": model, "optimizer": optimizer})
if checkpoints.restore_newest() is None:
    checkpoints.save(wait=True)
saved = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.named_parameters()}
strategy.print("sum", sum(float(p.sum()) for p in saved.values()))
if "fault" in sys.argv and strategy.topology.index == 3:
    with torch.no_grad():
        model[0].weight.to_local()[0, 0] += 1e-9
    strategy.check_mirrored()
elif "fault" in sys.argv:
    strategy.check_mirrored()
mesh = getattr(model[0].weight, "device_mesh", None)
strategy.print(mesh and (mesh.mesh_dim_names, mesh.shape), float(loss))
"""


@pytest.mark.extended
def test_hosts_replicate_the_shards(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(HOSTS)
    places = [str(tmp_path / name) for name in ("hosts", "one")]
    result = run_program(["-m", "mirrored", "cluster", "--workers", "2", str(script), places[0]], code=0)
    one = run_program([str(script), places[1]], env={"CUDA_VISIBLE_DEVICES": ""}, code=0)
    total, line = result.stdout.strip().splitlines()
    text, _, loss = line.rpartition(" ")
    assert text == "(('replicate', 'shard'), (2, 2))"
    assert float(loss) == pytest.approx(float(one.stdout.split()[-1]), rel=1e-12)
    for place in places:  # the checkpoint of the hosts, in which each part is saved once, and that of one device
        restored = run_program([str(script), place], env={"CUDA_VISIBLE_DEVICES": ""}, code=0)
        assert float(restored.stdout.split()[1]) == pytest.approx(float(total.split()[1]), rel=1e-12)
    uneven = run_program(
        ["-m", "mirrored", "cluster", "--workers", "2", str(script), str(tmp_path / "uneven"), "uneven"], code=0
    )
    assert "(('shard',), (3,)) " in uneven.stdout
    assert float(uneven.stdout.split()[-1]) == pytest.approx(float(one.stdout.split()[-1]), rel=1e-12)
    faulty = run_program(["-m", "mirrored", "cluster", "--workers", "2", str(script), str(tmp_path / "other"), "fault"])
    assert "parameter Sequential.0.weight is no longer the same on all towers" in faulty.stderr
    assert "towers 0 and 1 differ from towers 2 and 3" in faulty.stderr


# -- what is refused -------------------------------------------------------------------------------------


def refused(kind: str) -> None:
    options: dict[str, Any] = {"shard_optimizer": {"shard_optimizer": True}, "virtual_towers": {"virtual_towers": 2}}
    strategy = mirrored.MirroredStrategy(seed=0, **options.get(kind, {}))
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    early = torch.optim.SGD(model.parameters(), 0.1)
    units: Any = ["Block"] if kind == "units" else [nn.Linear]
    if kind == "dtypes":
        model[0].bias = nn.Parameter(model[0].bias.double())
    if kind == "meta":
        model[1] = nn.ParameterList([torch.empty(3, device="meta")])
    if kind == "positions":
        model[1].register_buffer("positions", torch.arange(3, device="meta"))
        model[1].to("meta")
    if kind == "mask":
        model[1].register_buffer("mask", torch.ones(3, dtype=torch.bool, device="meta"))
        model[1].to("meta")
    if kind == "tied":
        model[1].weight = nn.Linear(3, 3).weight
        model[0].weight = model[1].weight
    if kind in ("twice", "late"):
        strategy.shard(model, units) if kind == "twice" else strategy.run(lambda: None)
    strategy.shard(model, units)
    optimizer = early if kind == "optimizer" else torch.optim.SGD(model.parameters(), 0.1)
    second = strategy.shard(nn.Linear(3, 1)) if kind == "second model" else model

    def step(x: Tensor) -> None:
        if kind == "second model":
            with strategy.no_sync():
                (model(x) + second(x)).sum().backward()
            model(x).sum().backward()
            optimizer.step()
            torch.optim.SGD(second.parameters(), 0.1).step()
        elif kind == "grad":
            strategy.grad(model(x).sum(), model.parameters())
        elif kind == "average_gradients":
            strategy.average_gradients(model.parameters())
        elif kind == "no_sync":
            with strategy.no_sync():
                model(x).sum().backward()
        else:
            model(x).sum().backward()
        optimizer.step()

    strategy.run(step, args=(torch.ones(2, 3),))


REFUSED = {
    "units": (ValueError, "units=Block matches no module of Sequential, which has Linear, Sequential"),
    "dtypes": (ValueError, "but in 0, weight is float32 and bias is float64: convert them"),
    "meta": (ValueError, r"(ParameterList) has tensors on the meta device, but no reset_parameters() that gives"),
    "positions": (ValueError, "1 (Linear) has tensors on the meta device, but no reset_parameters() that gives"),
    "mask": (ValueError, "1 (Linear) has tensors on the meta device, but no reset_parameters() that gives"),
    "tied": (ValueError, "0.weight is also a weight of the unit 1: leave Linear out of units, or choose"),
    "twice": (ValueError, "0.weight is sharded already"),
    "late": (mirrored.MirrorError, "strategy.run was called before strategy.shard"),
    "optimizer": (mirrored.MirrorError, "SGD was created before strategy.shard(model)"),
    "no_sync": (mirrored.MirrorError, "gradients were accumulated under no_sync"),
    "second model": (mirrored.MirrorError, "gradients were accumulated under no_sync"),
    "grad": (ValueError, "strategy.grad() of sharded parameters: only loss.backward()"),
    "average_gradients": (ValueError, "strategy.average_gradients() of sharded parameters: only loss.backward()"),
    "shard_optimizer": (ValueError, "cannot be combined with shard_optimizer=True"),
    "virtual_towers": (ValueError, "cannot be combined with virtual_towers"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: str) -> None:
    error, text = REFUSED[kind]
    said = text_of(Exception, launch, refused, kind)
    assert f"{error.__name__}: " in said
    assert text in said


# -- models of others ------------------------------------------------------------------------------------


def language_model(strategy: mirrored.Strategy, way: str) -> list[float]:
    """Losses of a causal language model of Hugging Face, whose class names its units."""
    import peft
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
    with strategy.scope(), torch.device("meta" if way == "meta" else "cpu"):
        model: Any = transformers.LlamaForCausalLM(config)
    if way == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    strategy.shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert strategy.num_replicas_in_sync == 1 or all(hasattr(p, "full_tensor") for p in model.parameters())
    optimizer = torch.optim.AdamW(trained, 0.01)
    tokens = torch.randint(30, (18, 7), generator=torch.Generator().manual_seed(1))

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        logits = model(input_ids=x).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        loss = mirrored.compute_average_loss(each.view(len(x), -1).mean(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = strategy.distribute_dataset(tokens, 4, stand_in=True)
    return [float(strategy.reduce("sum", strategy.run(step, args=(x,)))) for _ in range(2) for x in data]


@pytest.mark.extended
@pytest.mark.parametrize("way", ["", "lora", "meta"])
def test_a_language_model_of_hugging_face(way: str) -> None:
    pytest.importorskip("peft", reason="it needs PEFT and transformers")
    [expected] = towers(language_model, way, count=1)
    assert expected[-1] < expected[0]
    for count in (2, 3):
        for found in towers(language_model, way, count=count):
            assert found == pytest.approx(expected, rel=1e-5)


def compiled(strategy: mirrored.Strategy, way: str) -> list[Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with strategy.scope():
        model = seeded(lambda: nn.Sequential(*(Block(8) for _ in range(2))))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if way == "bfloat16" else None
    strategy.shard(model, [Block], mixed_precision=policy)
    if way == "compiled":
        for block in model:
            block.compile()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = mirrored.compute_average_loss((model(x) - x).float().square().mean(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    return [strategy.reduce("sum", strategy.run(step, args=(b,))) for b in strategy.distribute_dataset(x, 4)]


@pytest.mark.extended
@pytest.mark.parametrize(("way", "tolerance"), [("compiled", 1e-5), ("autocast", 1e-2), ("bfloat16", 3e-2)])
def test_compiled_blocks_and_other_dtypes(way: str, tolerance: float) -> None:
    [expected] = towers(compiled, "", count=1)
    for found in towers(compiled, way):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)


def _train_partly(shards: bool) -> tuple[list[Tensor], list[Tensor]]:
    """A model whose blocks are sharded, and whose embedding and head are mirrored."""
    torch.set_default_dtype(torch.float64)
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = seeded(Tied)
    if shards:
        for block in model.blocks:
            strategy.shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    step = averaging_step(model, optimizer)
    for batch in strategy.distribute_dataset(data_for("tied"), BATCH, shuffle=True):
        losses.append(strategy.reduce("sum", strategy.run(step, args=batch)))
    strategy.check_mirrored()
    return losses, [whole(p) for p in model.parameters()]


def test_a_part_of_a_model_is_sharded_and_the_rest_mirrored() -> None:
    (one,) = launch(_train_partly, False, count=1)
    for found in launch(_train_partly, True, count=3):
        for values, expected in zip(found, one, strict=True):
            for value, other in zip(values, expected, strict=True):
                torch.testing.assert_close(value, other, rtol=EXACT, atol=EXACT)


def _convert() -> list[torch.dtype]:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    strategy.shard(model, [nn.Linear])
    model.to("cpu").double()

    def step() -> None:
        mirrored.compute_average_loss(model(torch.ones(2, 4).double())[:, 0], global_batch_size=4).backward()

    strategy.run(step)
    return [p.grad.dtype for p in model.parameters()]


class Family(Tied):
    """A model that names units as one of a family, of which one shares a weight with the head, and one is missing."""

    _no_split_modules = ("Embedding", "Block", "Decoder")


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)
        self.weight = nn.Parameter(torch.zeros(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        torch.arange(4, out=self.positions)
        self.mask.copy_(torch.tensor([True, False, True, True]))


def family(strategy: mirrored.Strategy) -> tuple[list[Any], ...]:
    """Properties of a sharded model whose units share weights, and the tensors of one with other values on meta."""
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = strategy.shard(seeded(Family))
        x = torch.arange(8).view(2, 4)
        logits = strategy.run(lambda x=x, model=model: model(x))
        found.append([model.head.weight is model.embedding.weight, len(list(model.parameters())), logits.shape])
    torch.manual_seed(3)
    expected = [*Positions().buffers(), torch.rand(1)]
    with torch.device("meta"):
        other = Positions()
    torch.manual_seed(3)
    strategy.shard(other)
    given = [*other.buffers(), torch.rand(1)]
    return *found, [one.equal(two) for one, two in zip(given, expected, strict=True)]


def test_units_that_share_a_weight_and_tensors_of_whole_numbers() -> None:
    count = len(list(Tied().parameters()))
    for real, meta, equal in towers(family):
        assert real == meta == [True, count, (2, 12)]
        assert equal == [True, True, True]


def loaded(strategy: mirrored.Strategy) -> tuple[list[str], list[str], str, str]:
    """Names of values that differ after loading whole tensors and sharded ones, and the errors of wrong ones."""
    model = strategy.shard(seeded(Tied), [Block])
    wanted = {name: torch.full_like(value, 0.5) for name, value in Tied().state_dict().items()}
    model.load_state_dict(wanted)
    whole_ones = [name for name, value in model.state_dict().items() if not whole(value).equal(wanted[name])]
    other = strategy.shard(seeded(Tied), [Block])
    other.load_state_dict(model.state_dict())
    sharded_ones = [name for name, value in other.state_dict().items() if not whole(value).equal(wanted[name])]
    state = {**wanted, "head.weight": torch.ones(5, 5), "embedding.weight": torch.ones(5, 5)}
    missing = {name: value for name, value in wanted.items() if name != "blocks.1.wide.bias"}
    return whole_ones, sharded_ones, *(text_of(RuntimeError, model.load_state_dict, s) for s in (state, missing))


def test_a_sharded_model_loads_whole_tensors() -> None:
    for whole_ones, sharded_ones, shape, missing in towers(loaded, count=3):
        assert (whole_ones, sharded_ones) == ([], [])
        assert "size mismatch for embedding.weight" in shape
        assert 'Missing key(s) in state_dict: "blocks.1.wide.bias"' in missing


def test_a_sharded_model_is_converted() -> None:
    assert launch(_convert) == [[torch.float64] * 4] * 2


KINDS = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD"]


def _losses_with(kind: str, shards: bool) -> list[float] | str:
    torch.set_default_dtype(torch.float64)
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = seeded(lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 1, bias=False)))
    if shards:
        strategy.shard(model, [nn.Linear])
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))

    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mirrored.compute_average_loss((model(x)[:, 0] - x.sum(1)).square())
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure if kind == "LBFGS" else None)
        return loss.detach()

    losses = []
    try:
        for batch in strategy.distribute_dataset(x, 4):
            losses.append(float(strategy.reduce("sum", strategy.run(step, args=(batch,)))))
    except mirrored.MirrorError as error:
        return str(error)
    return losses


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_torch_have_the_numbers_of_one_device(kind: str) -> None:
    (one,) = launch(_losses_with, kind, False, count=1)
    for found in launch(_losses_with, kind, True, count=3):
        assert found == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS", "Muon", "Rprop"])
def test_other_optimizers_of_torch_are_refused(kind: str) -> None:
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    for text in launch(_losses_with, kind, True):
        assert f"{kind} cannot step sharded parameters" in text
