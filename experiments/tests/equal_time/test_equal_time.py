"""Equal training time: every arm reads the same windows, for as many seconds, and differences are what was drawn."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from examples.train_lm import checkpoint, memory
from examples.train_lm.data import prepare
from examples.train_lm.model import Decoder
from examples.train_lm.parallel import World
from examples.train_lm.settings import PRESETS, Settings, Shape
from experiments.equal_time import evaluate, results, windows
from experiments.equal_time.arms import ARMS, LENGTH, Arm, TunedSettings
from experiments.equal_time.results import Result
from experiments.equal_time.run import run

VOCABULARY, SHORT = 320, 256
SHAPE = Shape(dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp_dim=64, vocabulary=VOCABULARY)
CPU = World(torch.device("cpu"))
SAME_PAIRS = "window", "power-of-two", "chosen-blocks"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Tokens of twelve packages, and windows of SHORT tokens in the packages held out."""
    folder = tmp_path_factory.mktemp("equal_time")
    generator = np.random.default_rng(0)
    for number in range(12):
        package = folder / "text" / f"package{number}"
        package.mkdir(parents=True)
        names = [f"value_{number}_{i}" for i in range(40)]
        for file in range(2):
            lines = [f"{names[a]} = {names[b]} + {b}" for a, b in generator.integers(40, size=(60, 2))]
            (package / f"file{file}.py").write_text("\n".join(lines))
    prepare(folder / "data", VOCABULARY, folder / "text", quiet=True, held_out_share=0.25)
    windows.prepare(folder / "data", VOCABULARY, count=8, length=SHORT)
    return folder / "data"


def test_far_labels_are_of_identifiers_that_were_seen_before_and_not_since(data, monkeypatch):
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    text = "alpha_beta = other_name\n" + "x = 1\n" * 60 + "alpha_beta = alpha_beta + new_name\n"
    ids = np.array(tokenizer.encode(text).ids)
    monkeypatch.setattr(windows, "FAR", 40)
    far = windows._find_far(ids, windows._token_texts(tokenizer, VOCABULARY))
    assert far.shape == (len(ids) - 1,)
    marked = np.flatnonzero(np.append(False, far))
    assert (np.diff(marked) == 1).all()  # one place: the second of the three
    said = tokenizer.decode(ids[marked].tolist())
    assert said.strip() == "alpha_beta" and marked[0] > 100
    monkeypatch.setattr(windows, "FAR", 10_000)
    assert not windows._find_far(ids, windows._token_texts(tokenizer, VOCABULARY)).any()


@pytest.mark.parametrize("context", [SHORT, 64])
def test_a_label_is_predicted_from_the_tokens_of_its_window_that_the_context_reaches(context):
    torch.manual_seed(0)
    model = Decoder(Settings(SHAPE, length=SHORT)).eval()
    ids = torch.randint(VOCABULARY, (SHORT + 1,))
    stride = 16
    found = evaluate.token_losses(model, ids, context, stride, together=SHORT)
    for label in (0, 40, 63, 64, 100, 255):
        # The window that first holds the label: its last ``stride`` labels are new, all of the first window's are.
        first = max(0, math.ceil((label + 1 - context) / stride) * stride)
        logits = model(ids[None, first : label + 1])[0, -1]
        wanted = torch.nn.functional.cross_entropy(logits, ids[label + 1])
        torch.testing.assert_close(found[label], wanted, rtol=1e-4, atol=1e-4)


def test_windows_powers_of_two_and_chosen_blocks_keep_as_many_pairs():
    pairs = {name: memory.kept_pairs(Settings(PRESETS["30M"], ARMS[name].masks), LENGTH) for name in SAME_PAIRS}
    assert max(pairs.values()) < 1.01 * min(pairs.values()) and pairs["chosen-blocks"] <= pairs["power-of-two"]


@pytest.fixture
def short_runs(monkeypatch):
    """So many steps fit in a budget, however busy the machine is, and curves have few points."""
    monkeypatch.setattr("experiments.equal_time.run.step_seconds", lambda settings, arm, *_: ({arm.length: 1 / 64}, 0.0))
    monkeypatch.setattr("experiments.equal_time.run.CURVE_POINTS", 4)


ARM = {
    "dense": Arm(("causal",), length=SHORT),
    "dense-8k": Arm(("causal",), length=SHORT // 4),
    "window": Arm(("causal & local(16)",), length=SHORT),
    "chosen-blocks": Arm(("topk_blocks(3, block=16) | local(20)",), length=SHORT),
}


def trained(name: str, data: Path, seconds: float = 0.3, seed: int = 1, **options) -> dict:
    found = run(name, ARM[name], SHAPE, TunedSettings(1e-2, False), seconds, seed, data, CPU, SHORT, compiled=False, **options)
    return {"preset": "tiny", **found}


@pytest.mark.smoke
def test_results_hold_what_was_trained_and_how_it_was_read_and_differences_are_paired(short_runs, data, tmp_path):
    files = []
    for name, seed in (("dense", 1), ("dense-8k", 1), ("window", 1), ("window", 2), ("chosen-blocks", 1)):
        files.append(tmp_path / f"{name}-{seed}.json")
        files[-1].write_text(json.dumps(trained(name, data, seed=seed)))
    dense, short = (json.loads(path.read_text()) for path in files[:2])
    assert list(dense["evaluations"]) == ["whole"] and len(short["evaluations"]) == 4
    found = dense["evaluations"]["whole"]
    assert found["borders"] == [0, SHORT] and sum(found["tokens"]) == SHORT
    reported = windows.load(data, "reported")
    assert np.array(found["nats"]).shape == (len(reported), 1) and found["far_tokens"] == reported.far.sum(1).tolist()
    assert 0.5 < evaluate.mean_loss(found) < math.log(VOCABULARY)
    assert dense["tokens"] == dense["settings"]["steps"] * SHORT == dense["curve"][-1]["tokens"] == 19 * SHORT
    assert dense["curve"][-1]["nats"] < dense["curve"][0]["nats"]
    by_arm = results.load(files)
    gain, other = (results.gain(by_arm[a], by_arm[b]) for a, b in (("dense", "window"), ("window", "dense")))
    assert gain.nats == pytest.approx(by_arm["window"].loss - by_arm["dense"].loss) == -other.nats and gain.error > 0


def test_an_arm_that_continues_from_a_checkpoint_begins_where_that_ended(short_runs, data, tmp_path):
    first = trained("dense", data, 0.2, keep=tmp_path / "kept")
    second = trained("window", data, 0.1, seed=2, start=checkpoint.resolve_checkpoint(tmp_path / "kept"))
    assert second["arm"] == "window continued" and second["curve"][0]["step"] == 0
    assert second["curve"][0]["nats"] == pytest.approx(first["curve"][-1]["nats"], abs=0.02)
    picture = results.plot({second["arm"]: results.Result(second["arm"], [second])}, tmp_path / "continued.png")
    assert picture.stat().st_size > 10_000


def test_times_to_a_loss_are_read_off_the_curve():
    curve = [{"tokens": 100 * i, "seconds": 10 * i, "nats": nats} for i, nats in ((1, 5.0), (2, 4.0), (3, 4.5), (4, 3.0))]
    one = Result("dense", [{"curve": curve}])
    assert one.find_crossing(4.5, "tokens") == 150 and one.find_crossing(4.0, "seconds") == 20
    assert one.find_crossing(3.75, "tokens") == 350 and one.find_crossing(2.9, "tokens") == math.inf
    assert one.last_quarter == pytest.approx((4.5 - 3.0) / 4.5)
