"""The report in a real browser: offline, every figure drawn, nothing asked of anyone, no complaint in the console."""

import pytest

from treespec.cost import CostCurve
from treespec.pairs import load_pair
from treespec.prompts import Prompt
from treespec.report import report
from treespec.trace import Caps, record

from .conftest import PICTURES

pytestmark = pytest.mark.browser
NASTY = "<img src='http://example.invalid/x.png' onerror='window.hacked = 1'>"
TEXTS = ["the cat sat", "a dog ran on", "the tree", "mat under a", "dog sat on the mat", "a cat"]
COST = CostCurve((1.0, 7.0, 8.0, 64.0), (0.01, 0.0101, 0.04, 0.4), (1.0, 64.0), (1e-4, 2e-4), name="planted")


class Nasty:
    """A tokenizer whose every token asks for a picture."""

    def decode(self, tokens, **_):
        return NASTY


@pytest.fixture(scope="module")
def review(tmp_path_factory):
    home = tmp_path_factory.mktemp("report")
    prompts = [Prompt(f"{i} {NASTY}", "x", [text]) for i, text in enumerate(TEXTS)]
    record(load_pair("toy", "model"), prompts, home / "t.parquet", caps=Caps(floor=1e-3, depth=8, width=12, nodes=128))
    report(home / "t.parquet", home / "review.html", COST, settings=16, tokenizer=Nasty())
    return home / "review.html"


@pytest.fixture
def opened(page, review):
    """The page, opened from disk without a network; what it asked for and complained of."""
    seen = {"requests": [], "complaints": []}
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.on("console", lambda message: seen["complaints"].append(message.text))
    page.on("pageerror", lambda error: seen["complaints"].append(str(error)))
    page.context.set_offline(True)
    page.goto(review.as_uri(), timeout=90_000)
    page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=90_000)
    return page, seen


def test_it_opens_offline_and_draws_everything(opened, review):
    page, seen = opened
    places = page.locator("[data-figure]")
    drawn = page.locator("[data-figure].js-plotly-plot")
    assert places.count() == drawn.count() >= 6
    for place in drawn.all():
        assert place.locator(".main-svg").first.bounding_box()["width"] > 600
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    page.wait_for_timeout(500)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0 and "<img" in page.locator("body").text_content()
    assert seen == {"requests": [review.as_uri()], "complaints": []}


def test_a_script_that_slipped_in_would_not_run(opened):
    page, _ = opened
    page.evaluate("""() => {
        const own = document.createElement("script");
        own.textContent = "window.slipped = 1";
        document.body.append(own);
        document.body.insertAdjacentHTML("beforeend", "<a id=in onclick='window.slipped = 2'>x</a>");
        document.getElementById("in").click();
    }""")
    assert page.evaluate("window.slipped") is None


def test_hover_tells_and_the_keyboard_unfolds(opened):
    page, _ = opened
    bar = page.locator("[data-figure=figure-time] .bars .point").nth(2)
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(".hoverlayer .hovertext").first.wait_for(timeout=10_000)
    assert "ms of a step" in page.locator(".hoverlayer .hovertext").first.text_content()
    first = page.locator("details summary").first
    first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    assert page.locator("details table").first.is_visible()


def test_it_reads_light_dark_narrow_and_on_paper(opened):
    page, _ = opened
    PICTURES.mkdir(exist_ok=True)
    for name, scheme, width in (("light", "light", 1250), ("dark", "dark", 1250), ("narrow", "light", 1000)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1500)  # the figures fit themselves
        page.screenshot(path=PICTURES / f"report-{name}.png", full_page=True)
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{name} scrolls sideways by {overflow} pixels"
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 24, 28)" if scheme == "dark" else "rgb(255, 255, 255)")
    page.emulate_media(color_scheme="dark", media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_timeout(500)
    assert page.locator("details:not([open])").count() == 0
    assert {
        round(p.locator(".main-svg").first.bounding_box()["width"]) for p in page.locator("[data-figure]").all()
    } == {680}
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    page.emulate_media(media="screen")
