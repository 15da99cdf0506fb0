"""The video experiment: scenes that follow the rules of motion, the arithmetic of flow, masks and their shares, the commands."""

import json

import pytest
import torch
from typer.testing import CliRunner

import sparse_flash as sf
from experiments.video import flow
from experiments.video.cli import app
from experiments.video.masks import BY_SHARE, NAMES, SHARES, VSA, masks_of
from experiments.video.model import PRESETS, Sizes, Transformer
from experiments.video.scenes import make_videos

CPU = torch.device("cpu")
TINY = Sizes(side=32, dim=64, heads=1, layers=2)


def test_exact_velocities_lead_from_noise_to_the_video_in_any_number_of_steps():
    video, noise = make_videos(2, 0, 4, 8, CPU).double(), torch.randn(2, 4, 3, 8, 8, dtype=torch.float64)
    for steps in (1, 7):
        # The velocity at a point, and that of the line: both lead there.
        for velocity in (lambda x, time, _: (x - video) / time.double().view(-1, 1, 1, 1, 1), lambda *_: noise - video):
            torch.testing.assert_close(flow.sample_videos(velocity, video, noise, 1, steps), video)
    predicted = flow.sample_videos(lambda x, time, _: flow.to_velocity(video, x, time.double()), video, noise, 1, flow.LONGEST)
    torch.testing.assert_close(predicted, video, rtol=1e-5, atol=1e-6)
    assert flow.loss(noise - video, video, noise, 1).abs().max() == 0
    time = torch.tensor([0.0, 1.0], dtype=torch.float64)
    point = flow.interpolate(video, noise, time, 1)
    assert torch.equal(point[0], video[0]) and torch.equal(point[1, 1:], noise[1, 1:]) and torch.equal(point[1, :1], video[1, :1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dense", VSA)])
@pytest.mark.parametrize("share", SHARES)
def test_masks_keep_their_share_and_each_tile_itself(name, share):
    layout, q = PRESETS["full"].layout, torch.randn(1, 2, 4096, 16)
    first, *_, last = masks_of(name, share, layout, 3, CPU)
    mask = sf.choose_blocks(first, q, q) if isinstance(first, str) else first
    assert mask.kept_blocks().diagonal(dim1=-2, dim2=-1).all()
    assert mask.block_density == pytest.approx(share, abs=0.01) or name not in BY_SHARE
    assert mask.block_density < 0.5
    if name == "random":  # each layer has its own
        assert not torch.equal(first.kept_blocks(), last.kept_blocks())


def test_a_mask_that_keeps_everything_is_dense_attention_and_patches_are_the_video():
    torch.manual_seed(0)
    model = Transformer(TINY)
    for parameter in model.parameters():  # from zero, nothing would pass the blocks
        parameter.data += 0.1 * torch.randn_like(parameter)
    video, time = make_videos(2, 0, TINY.frames, TINY.side, CPU), torch.rand(2)
    assert torch.equal(model.video(model.patches(video)), video)
    dense, windows = model(video, time, [None] * 2), [sf.tile_window(model.layout, model.layout.tile_grid)] * 2
    torch.testing.assert_close(model(video, time, windows), dense, rtol=1e-4, atol=1e-5)
    sparse = model(video, time, masks_of("window", 0.125, model.layout, 2, CPU))
    assert dense.shape == video.shape and (sparse - dense).abs().max() > 1e-3


@pytest.mark.smoke
def test_models_are_trained_once_and_rows_measured_once_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    models, files = ["--models", tmp_path, "--device", "cpu"], [tmp_path / "first.json", tmp_path / "second.json"]

    def run(*arguments):
        result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    training = ["--preset", "tiny", "--batch", "1", "--steps", "2", *models]
    assert "2 steps" in run("train", "dense", *training)
    before = (tmp_path / "dense-0.pt").read_bytes()
    assert "is there" in run("train", "dense", *training) and (tmp_path / "dense-0.pt").read_bytes() == before
    run("train", VSA, "--start", tmp_path / "dense-0.pt", *training)

    wanted = ["dense", "still", "window 0.125", "sampled 0.125, first 20% dense", "vsa 0.125, tuned", "random 0.125, trained"]
    measuring = ["measure", *models, "--scenes", "2", "--steps", "5", *(text for name in wanted for text in ("--rows", name))]
    assert "random-0.125-0.pt is missing" in run(*measuring, "--out", files[0], "--part", "2/2")
    run(*measuring, "--out", files[1], "--part", "1/2")
    written = files[1].read_text()
    assert run(*measuring, "--out", files[1], "--part", "1/2").count("dB") == 0 and files[1].read_text() == written

    page = tmp_path / "page.md"
    headings = "| row | kept | like dense, dB | like the truth, dB | than dense, dB | flow loss | steps |"
    page.write_text(f"before\n{headings}\n| --- |\n| old |\nafter")
    kept, picture = tmp_path / "kept.json", tmp_path / "frames.png"
    said = run("draw", *files, "--target", picture, "--keep", kept, "--page", page)
    found = json.loads(kept.read_text())["rows"]
    assert [row["row"] for row in found] == [*wanted[:2], "window 0.125", *wanted[3:5]] and "strips" not in found[0]
    assert max(found[0]["dense"]) == 0 < min(found[0]["truth"]) and found[0]["density"] == 1
    assert found[3]["density"] == pytest.approx(0.2 + 0.8 * 0.125) and found[4]["training"]["steps"] == 2
    assert picture.exists() and "| vsa 0.125, tuned | 12.5% |" in said
    assert page.read_text().startswith("before") and "old" not in page.read_text() and "| still |" in page.read_text()
