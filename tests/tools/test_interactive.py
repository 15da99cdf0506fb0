"""Interactive pictures: what a page holds, decoded here; and what its JavaScript makes of that, in a headless Chromium."""

import base64
import html
import json
import re
import shutil
import subprocess
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import strategies
import torch
from cli.test_cli import invoke
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_flash as sf
from sparse_flash.masks.tiles import unpack_bits
from sparse_flash.tools import draw, interactive
from sparse_flash.tools.explain import reachability


def numbers_of(page):
    """The head of a page, and its numbers."""
    head, data = (re.search(rf'id="{name}">(.*?)</script>', page, re.S)[1] for name in ("head", "data"))
    return json.loads(head), np.frombuffer(zlib.decompress(base64.b64decode(data)), "<i4").cumsum(dtype=np.int32)


def decoded(page):
    """The panels of a page: their names, and by name (q_len, kv_len) bool, the pairs that each keeps."""
    head, numbers = numbers_of(page)
    size = head["block"]
    q_blocks, kv_blocks, words = -(-head["q_len"] // size), -(-head["kv_len"] // size), -(-size // 32)
    counts = [count for panel in head["panels"] for count in [q_blocks, *[panel["runs"]] * 3]]
    *axes, bits = np.split(numbers, np.cumsum(counts))
    tiles = unpack_bits(bits.reshape(-1, size, words), size)
    dense = {}
    for number, panel in enumerate(head["panels"]):
        of_row, *runs = axes[4 * number : 4 * number + 4]
        kept = np.zeros((q_blocks, kv_blocks, size, size), bool)
        for row, first, stop, which in zip(np.repeat(np.arange(q_blocks), of_row), *runs, strict=True):
            kept[row, first:stop] = tiles[which]
        pairs = kept.transpose(0, 2, 1, 3).reshape(q_blocks * size, -1)
        dense[panel["name"]] = pairs[: head["q_len"], : head["kv_len"]]
    return dense


@given(strategies.expressions, strategies.lengths, strategies.block_sizes)
def test_a_page_holds_the_mask(pattern, lengths, block_size):
    mask = sf.compile_mask(pattern, *lengths, block_size)
    (kept,) = decoded(interactive.page_of(mask, "").html).values()
    assert np.array_equal(kept, mask.to_dense().numpy())


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([16, 64]), st.integers(1, 130), st.integers(1, 130), st.integers(0, 1), st.data())
def test_the_heads_of_a_page_are_those_asked_for(seed, block, q_len, kv_len, batch, data):
    rng = np.random.default_rng(seed)
    blocks = rng.random((2, 5, -(-q_len // block), -(-kv_len // block))) < 0.5
    mask = sf.BlockMask.from_blocks(torch.from_numpy(blocks), block, q_len, kv_len, within="causal")
    heads = data.draw(st.none() | st.lists(st.integers(0, 4), min_size=1))
    page = sf.draw(mask, interactive=True, heads=heads, batch=batch)
    kept, dense = decoded(page.html), mask.to_dense().numpy()[batch]
    assert list(kept) == [f"head {head}" for head in dict.fromkeys(range(5) if heads is None else heads)]
    for name, pairs in kept.items():
        assert np.array_equal(pairs, dense[int(name.split()[1])])


def test_heads_with_the_same_mask_are_one_panel():
    spec = "per_head([causal, local(40), causal, causal, local(40), full])"
    kept = decoded(sf.draw(spec, interactive=True, q_len=300, block_size=32).html)
    assert list(kept) == ["heads 0, 2-3", "heads 1, 4", "head 5"]
    for spec, pairs in zip(("causal", "local(40)", "full"), kept.values(), strict=True):
        assert np.array_equal(pairs, sf.compile_mask(spec, 300).to_dense().numpy())
    assert list(decoded(sf.draw("causal", interactive=True, q_len=300).html)) == [""]


@pytest.mark.parametrize("spec", ["causal", "full", "causal & local(4096)", "causal & (local(256) | power_of_two)", "sinks(3)"])
def test_pages_of_a_million_tokens_are_small(spec):
    mask = sf.compile_mask(spec, 1 << 20)
    assert len(interactive.page_of(mask, spec).html) < 350_000


@pytest.mark.parametrize("spec", ["random(0.3, block=16)", "random(0.3, block=1)"])
def test_a_page_without_room_is_refused_with_the_way_out(spec, monkeypatch):
    def page():
        return sf.draw(spec, q_len=256, block_size=16, interactive=True).html

    most = len(numbers_of(page())[1]) - 16  # the counts of the 16 rows are few
    monkeypatch.setattr(interactive, "MOST_NUMBERS", most)
    page()
    monkeypatch.setattr(interactive, "MOST_NUMBERS", most - 1)
    with pytest.raises(ValueError, match=f"at most {most - 1:,} numbers; .* larger block_size, fewer heads or shorter"):
        page()


def test_a_title_is_shown_as_it_is_and_runs_nothing():
    title = "</title><script>alert(1)</script> @DATA@ @HEAD@ & \\1"
    page = sf.draw("causal", q_len=64, interactive=True, title=title)
    assert page.html.count(html.escape(title)) == 2 and "<script>alert" not in page.html and list(decoded(page.html)) == [""]


def test_a_page_loads_nothing_from_elsewhere():
    page = sf.draw("causal", q_len=64, interactive=True).html
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|\bimport\b|\bfetch\(", page)


def test_a_page_is_a_file_or_a_frame_of_a_notebook(tmp_path):
    page = sf.draw("causal & local(3)", tmp_path / "new" / "mask.html", q_len=100, interactive=True)
    assert (tmp_path / "new" / "mask.html").read_text(encoding="utf-8") == page.html
    assert html.unescape(re.search('srcdoc="(.*?)"', page._repr_html_(), re.S)[1]) == page.html
    assert "causal & local(3)" in repr(page) and len(repr(page)) < 200


def test_the_command_writes_a_page_beside_its_picture(tmp_path):
    path = tmp_path / "mask.html"
    out = invoke("show", "causal & local(100)", "-n", "1024", "--out", str(path)).output
    assert "1,024 x 1,024 tokens" in out and f"wrote {path}" in out.replace("\n", "")
    assert path.read_text(encoding="utf-8") == sf.draw("causal & local(100)", q_len=1024, interactive=True).html
    assert "a .png, .svg or .html file" in invoke("show", "causal", "--out", "mask.gif", code=2).stderr


def test_what_a_page_cannot_show_is_refused_with_the_way_out(tmp_path):
    mask = sf.BlockMask.per_head(["causal", "full"], q_len=64)
    with pytest.raises(ValueError, match=r"a \.html file must come with interactive=True; .* add it"):
        sf.draw("causal", tmp_path / "mask.html")
    with pytest.raises(ValueError, match=r"must be a \.html file; got 'mask\.png'; try 'mask\.html'"):
        sf.draw("causal", "mask.png", interactive=True)
    with pytest.raises(ValueError, match="heads and batch must come with interactive=True"):
        sf.draw(mask, heads=[0])
    with pytest.raises(ValueError, match="level must be 'auto' for an interactive picture"):
        sf.draw(mask, interactive=True, level="blocks")
    with pytest.raises(IndexError, match="head must be 0 to 1; got 2"):
        sf.draw(mask, interactive=True, heads=[0, 2])
    with pytest.raises(IndexError, match="batch must be 0 to 0; got 1"):
        sf.draw(mask, interactive=True, batch=1)
    with pytest.raises(ValueError, match="one head at least; got none"):
        sf.draw(mask, interactive=True, heads=[])
    picked = sf.BlockSelection.from_picks(torch.zeros(1, 1, 64, 1, dtype=torch.int32), 16)
    with pytest.raises(ValueError, match="must be of a BlockMask; got a BlockSelection"):
        sf.draw(picked, interactive=True)
    assert not list(tmp_path.iterdir())


# --- In a browser: make looks.


@pytest.fixture
def browse(tmp_path):
    """Opens a page in a headless Chromium and returns what a JavaScript function body returns there, after the page has started."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no Chromium on PATH (Debian: apt install chromium)")
    done = threading.Event()

    class Server(BaseHTTPRequestHandler):
        """The page counts as loaded, and is printed, when an image of it arrives: not before its script asks for another."""

        def do_GET(self):
            done.wait(100) if self.path == "/page-is-loaded" else done.set()
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    def open_page(page, script):
        done.clear()
        path = tmp_path / "page.html"
        run = f"started.then(async () => {{ {script} }}).catch((error) => `${{error.stack}}`)"
        end = f"(found) => {{ byId('facts').textContent = JSON.stringify(found); new Image().src = '{address}/script-is-done'; }}"
        probe = f'<pre id="facts"></pre><img src="{address}/page-is-loaded"><script>{run}.then({end})</script></body>'
        path.write_text(page.html.replace("</body>", probe))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1200,900",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        command = [browser, *options, "--dump-dom", path.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        facts = re.search(r'<pre id="facts">(.*?)</pre>', shown, re.S)
        assert facts and facts[1], shown[-2000:]
        return json.loads(html.unescape(facts[1]))

    yield open_page
    server.shutdown()
    server.server_close()


# Resolves when all pieces are drawn.
DRAWN = "const drawn = async () => { do await new Promise(requestAnimationFrame); while (waiting); };"

MASKS = [
    ("causal & local(40)", 200, 330, 32),
    ("causal", 330, 200, 16),
    ("strided(5, block=3)", 217, 190, 16),
    ("random(0.1, block=7) & causal", 700, 700, 256),
    ("local(3) & ~local(2) | random(0.3, block=1)", 150, 150, 64),
    ("causal & ~causal", 100, 100, 16),
    ("causal", 1, 1000, 128),
]


def shares_of(dense, unit_q, unit_k):
    """The share of kept pairs in each cell."""
    top, left = np.arange(0, dense.shape[0], unit_q), np.arange(0, dense.shape[1], unit_k)
    kept = np.add.reduceat(np.add.reduceat(dense, top, axis=0, dtype=np.int64), left, axis=1)
    return kept / np.outer(np.diff(top, append=dense.shape[0]), np.diff(left, append=dense.shape[1]))


@pytest.mark.browser
@pytest.mark.parametrize("spec, q_len, kv_len, block", MASKS)
def test_the_browser_counts_as_the_mask_does(browse, spec, q_len, kv_len, block):
    mask = sf.compile_mask(spec, q_len, kv_len, block)
    dense, rng = mask.to_dense().numpy(), np.random.default_rng(0)
    asked = []
    for _ in range(60):
        unit_q, unit_k = (int(2 ** rng.integers(0, 2 + np.log2(length))) for length in (q_len, kv_len))
        top, left = (int(rng.integers(0, -(-length // unit))) for length, unit in ((q_len, unit_q), (kv_len, unit_k)))
        rows, cols = (
            int(rng.integers(1, 1 - (-length // unit) - low))
            for length, unit, low in ((q_len, unit_q, top), (kv_len, unit_k, left))
        )
        asked.append([unit_q, unit_k, top, left, rows, cols])
    counted, sums = browse(
        sf.draw(mask, interactive=True),
        f"return [{json.dumps(asked)}.map((window) => [...shares(panels[0], ...window)]), sums(panels[0])];",
    )
    for (unit_q, unit_k, top, left, rows, cols), shares in zip(asked, counted, strict=True):
        expected = shares_of(dense, unit_q, unit_k)[top : top + rows, left : left + cols]
        assert np.allclose(np.reshape(shares, (rows, cols)), expected)
    assert sums == [int(dense.sum()), int((mask.block_states() > 0).sum())]


@pytest.mark.browser
@pytest.mark.parametrize("spec, q_len, kv_len, block", MASKS)
def test_the_browser_says_what_a_block_and_a_pair_are(browse, spec, q_len, kv_len, block):
    mask = sf.compile_mask(spec, q_len, kv_len, block)
    dense, states, rng = mask.to_dense().numpy(), mask.block_states().numpy(), np.random.default_rng(1)
    pairs = [[int(rng.integers(q_len)), int(rng.integers(kv_len))] for _ in range(40)]
    said = browse(sf.draw(mask, interactive=True), f"return {json.dumps(pairs)}.map((pair) => facts(panels[0], ...pair));")
    for (query, key), facts in zip(pairs, said, strict=True):
        row, col = query // block, key // block
        inside = dense[row * block : (row + 1) * block, col * block : (col + 1) * block]
        assert facts == {
            "pair": f"query {query:,}, key {key:,}: {'kept' if dense[query, key] else 'dropped'}",
            "block": f"({row:,}, {col:,}), {('empty', 'partial', 'full')[states[row, col]]}",
            "pairs": f"{inside.sum():,} of {inside.size:,} kept",
            "row": f"{(states[row] > 0).sum():,} of {states.shape[1]:,} blocks",
            "query": f"keeps {dense[query].sum():,} of {kv_len:,} keys",
        }


@pytest.mark.browser
@pytest.mark.parametrize(
    "spec, tokens, block",
    [
        ("causal & local(70)", 500, 64),
        ("butterfly(block=16)", 256, 16),
        ("causal & (sinks(3) | strided(8, block=1))", 300, 32),
        ("local(20) & ~local(2)", 333, 128),
        ("causal & documents([0, 100, 130, 290])", 290, 64),
        ("random(0.01, block=1)", 400, 16),
    ],
)
def test_the_browser_reaches_what_layers_reach(browse, spec, tokens, block):
    mask = sf.compile_mask(spec, tokens, block_size=block)
    script = "return [...Array(Q).keys()].map((query) => [...reach(panels[0], query)]);"
    first = np.array(browse(sf.draw(mask, interactive=True), script))
    seen = np.eye(tokens, dtype=bool)
    step = seen | mask.to_dense().numpy()
    for depth in range(8):
        assert np.array_equal(first <= depth, seen)
        seen = seen @ step
    for layers, share in reachability(mask).shares.items():
        assert np.tril(first <= layers).sum() / np.tri(tokens).sum() == pytest.approx(share)


@pytest.mark.browser
def test_reach_ends_where_the_page_counts_no_more_layers(browse):
    page = sf.draw("causal & local(2)", q_len=1000, interactive=True)
    layers, said = browse(page, "setMark(900); return [[...mark.layers[0]], byId('reach').textContent];")
    assert layers == [900 - token if 900 - 128 <= token <= 900 else 255 for token in range(1000)]
    assert "no more than 128" in said


# The pixel in the middle of the cell of a token.
PIXEL = """const pixel = (panel, query, key) => {
  const [unitQ, unitK] = [unitOf(view.sy, Q), unitOf(view.sx, K)];
  const [y, x] = [(Math.floor(query / unitQ) + 0.5) * unitQ - view.y, (Math.floor(key / unitK) + 0.5) * unitK - view.x];
  return [...panel.context.getImageData(LEFT + Math.floor(x * view.sx), TOP + Math.floor(y * view.sy), 1, 1).data].slice(0, 3);
};"""


@pytest.mark.browser
@pytest.mark.parametrize("scale, unit", [(0.25, 4), (0.5, 2), (10, 1)])
def test_the_picture_shows_the_cells_in_their_colours(browse, scale, unit):
    """Scales at which a cell is a whole number of pixels."""
    mask = sf.BlockMask.per_head(["causal & local(300)", "random(0.4, block=1) & strided(3)"], q_len=2000)
    rng, left = np.random.default_rng(2), 700 if scale == 10 else 0
    place = rng.integers(left, left + min(200, 25 * 10 / scale), (200, 2)) // 2 * 2
    place = place[((place % 128 > 8) & (place % 128 < 120)).all(1)].tolist()  # not on the lines between blocks
    shown = browse(
        sf.draw(mask, interactive=True),
        f"{DRAWN}{PIXEL} show({{x: {left}, y: {left}, sx: {scale}, sy: {scale}}}); await drawn();"
        f"return panels.map((panel) => {json.dumps(place)}.map(([query, key]) => pixel(panel, query, key)));",
    )
    for head, colours in enumerate(shown):
        shares = shares_of(mask.select(head).to_dense().numpy(), unit, unit)[tuple(np.array(place).T // unit)]
        assert np.abs(np.array(colours) - draw._rgb(shares)).max() <= 1
        assert len(np.unique(shares)) > 1


@pytest.mark.browser
def test_the_picture_of_reach_shows_the_first_layer_of_each_key(browse):
    tokens, query, spec = 400, 350, "causal & (local(4) | local(30) & ~local(29))"
    dense = sf.compile_mask(spec, tokens).to_dense().numpy()
    first, seen = np.full(tokens, 255), np.eye(tokens, dtype=bool)[query]
    for depth in range(40):
        first[seen & (first == 255)] = depth
        seen = seen | dense[seen].any(0)
    known, keys = first[first < 255], list(range(318, 353))
    found = browse(
        sf.draw(spec, q_len=tokens, interactive=True),
        DRAWN
        + """
        show({ x: 315, y: 200, sx: 12, sy: 12 }); setMark(QUERY); setDepth(2); await drawn();
        const at = (x, y) => panels[0].context.getImageData(x, y, 1, 1).data.slice(0, 3).join();
        const strip = KEYS.map((key) => at(LEFT + (key - 315) * 12 + 6, TOP - 9));
        const dropped = KEYS.map((key) => at(LEFT + (key - 315) * 12 + 6, TOP + 6)); // query 200, which drops all of these keys
        return [mark.most, strip, dropped, [1, 2].map((depth) => depthColour(depth, mark.most)), byId("seen").textContent];
        """.replace("QUERY", str(query)).replace("KEYS", str(keys)),
    )
    assert found[0] == known.max() > 2
    colours, unseen = ["28,36,48", *(colour[4:-1] for colour in found[3])], "233,236,241"
    assert found[1] == [colours[first[key]] if first[key] <= 2 else unseen for key in keys]
    assert len(set(found[1])) == 4
    assert [shown != unseen for shown in found[2]] == [bool(first[key] > 2) for key in keys]
    assert found[4] == f"sees{(first <= 2).sum()} tokens, {(first <= 2).mean() * 100:#.3g}\u00a0%"


@pytest.mark.browser
def test_mouse_and_keys_do_what_the_page_says(browse):
    mask = sf.BlockMask.per_head(["causal & local(300)", "causal & sinks(5)"], q_len=4000)
    found = browse(
        sf.draw(mask, interactive=True),
        DRAWN
        + """
        const { canvas } = panels[1], box = canvas.getBoundingClientRect(), found = {};
        const [dx, dy] = [box.left, box.top].map((at) => Math.round(at) - at);  // events of the wheel are at whole pixels
        const mouse = (kind, x, y, more) => canvas.dispatchEvent(new (kind === "wheel" ? WheelEvent : PointerEvent)(
          kind, { clientX: box.left + LEFT + x + dx, clientY: box.top + TOP + y + dy, ...more }));
        const tokens = (x, y) => [view.x + (x + dx) / view.sx, view.y + (y + dy) / view.sy];
        const key = (name) => byId("panels").dispatchEvent(new KeyboardEvent("keydown", { key: name }));
        found.whole = { ...view };
        const before = tokens(60, 90);
        for (let turns = 0; turns < 5; turns++) mouse("wheel", 60, 90, { deltaY: -200 });
        found.wheel = { scale: view.sx / found.whole.sx, moved: tokens(60, 90).map((at, axis) => at - before[axis]) };
        mouse("pointermove", 60, 90);
        found.here = byId("here").textContent;
        found.cursor = [cursor.query, cursor.key].map((at, axis) => at - Math.floor(tokens(60, 90)[1 - axis]));
        const start = { ...view };
        mouse("pointerdown", 60, 90); mouse("pointermove", 40, 60); mouse("pointerup", 40, 60);
        found.dragged = [(view.x - start.x) * view.sx, (view.y - start.y) * view.sy, mark];
        mouse("pointerdown", 60, 90); mouse("pointerup", 60, 90);
        found.marked = mark.query - Math.floor(tokens(60, 90)[1]);
        found.most = mark.most;
        key("]"); key("]"); key("[");
        found.depth = [mark.depth, Number(byId("layers").value), byId("reach").textContent];
        setMark(mark.query - 1);
        found.kept = mark.depth;
        key("Escape");
        found.cleared = mark;
        key("0");
        found.again = { ...view };
        setCursor(panels[0], 2000, 1000);
        key("ArrowDown"); key("ArrowRight"); key("Enter");
        found.keyboard = [cursor.query, cursor.key, mark.query, unitOf(view.sy, Q)];
        for (let turns = 0; turns < 40; turns++) key("+");
        found.tokens = [view.sx, cursor.query - view.y < height / view.sy && cursor.query >= view.y];
        for (let turns = 0; turns < 40; turns++) byId("out").click();
        await drawn();
        found.out = { ...view };
        return found;
        """,
    )
    whole = found["whole"]
    assert whole["x"] == whole["y"] == 0 and found["again"] == whole and found["out"] == pytest.approx(whole)
    assert found["wheel"]["scale"] == pytest.approx(32) and found["wheel"]["moved"] == pytest.approx([0, 0], abs=1e-6)
    assert found["cursor"] == [0, 0] and found["here"].startswith("headhead 1pairquery ")
    assert found["dragged"] == [pytest.approx(20), pytest.approx(30), None]
    assert found["kept"] == 2  # another query, as many layers
    assert found["marked"] == 0 and found["cleared"] is None
    assert (
        found["depth"][:2] == [2, 2]
        and f"after 2 layers with residual connections (nothing is added after {found['most']})" in found["depth"][2]
    )
    unit = found["keyboard"].pop()
    assert found["keyboard"] == [2000 + unit, 1000 + unit, 2000 + unit]
    assert found["tokens"] == [40, True]


@pytest.mark.browser
def test_a_million_tokens_are_drawn_at_every_scale(browse):
    spec, tokens = "causal & (local(1000) | power_of_two)", 1 << 20
    mask, query = sf.compile_mask(spec, tokens), 700_001
    keys = np.flatnonzero(mask.kept_keys(query).numpy())
    probes = [*map(int, keys[:: len(keys) // 3]), int(keys[-1]) + 1, 3]
    found = browse(
        sf.draw(mask, interactive=True),
        DRAWN
        + PIXEL
        + """
        const found = [];
        for (const key of PROBES) {
          whole(); await drawn();
          setCursor(panels[0], QUERY, key);
          while (view.sx < MOST_SCALE) { zoom(4); await drawn(); }
          cursor = null; later(); await drawn();
          found.push([pixel(panels[0], QUERY, key), facts(panels[0], QUERY, key).pair]);
        }
        return [found, sums(panels[0])];
        """.replace("QUERY", str(query)).replace("PROBES", str(probes)),
    )
    empty, full = (draw._rgb(np.array([share]))[0].tolist() for share in (0.0, 1.0))
    for (colour, said), key in zip(found[0], probes, strict=True):
        assert (colour, said.split(": ")[1]) == ((full, "kept") if key in keys else (empty, "dropped"))
    assert found[1] == [int(mask.kept_pairs()[0]), int(mask.mask_bounds()[0])]
