"""Tests the page in a headless browser: it renders without errors and without the network, the controls for search,
filters, order and runs work, and text of a run is not interpreted as markup."""

from __future__ import annotations

import shutil

import pytest

from tests.report.runs import SHOWN, write_run, write_trajectories
from tunix_like.cli.main import main
from tunix_like.rollout.files import write_rollouts
from tunix_like.storage.metrics import MetricsLog
from tunix_like.types import Problem

playwright = pytest.importorskip("playwright.sync_api")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: none of {', '.join(NAMES)}"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])  # root in a container
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A page with two runs. The name of the first run contains markup, like its texts."""
    folder = tmp_path_factory.mktemp("report")
    first = write_run(folder / "<img src=x onerror=alert(1)>", learning_rate=1e-3)
    second = write_run(folder / "second", steps=9, learning_rate=1e-4)
    assert main(["report", str(first), str(second), "--out", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.fixture
def page(browser, file):
    """The opened page. At the end of the test the console must be empty, and the file must be the only request."""
    context = browser.new_context(viewport={"width": 1300, "height": 900}, offline=True)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#rollouts .completion")
    yield page
    assert said == [] and asked == [file.as_uri()]
    assert page.evaluate("window.broken") is None
    context.close()


def completions(page):
    return page.eval_on_selector_all("#rollouts .completion pre", "all => all.map((each) => each.textContent)")


def numbers(page, name):
    """Returns the numbers that the cards show for `name` ('advantage', 'tokens'), in their order."""
    cards = page.eval_on_selector_all("#rollouts .completion .meta", "all => all.map((each) => each.innerText)")
    return [float(text.split(f"{name} ")[1].split()[0]) if f"{name} " in text else None for text in cards]


def test_text_with_markup_is_shown_as_text(page):
    """Covers the prompt, the completions, the names of the run and of its source, and a metric. Texts of the config are
    not shown."""
    page.locator("#rollouts .groups button").first.click()
    assert page.locator("#rollouts .prompt").text_content() == SHOWN
    assert completions(page)[0] == f"{SHOWN} 0"
    assert page.locator("h1").text_content() == "<img src=x onerror=alert(1)>, second"
    assert "<b>mix</b>" in page.locator("#rollouts .groups button").first.inner_text()
    page.locator("#overview details").first.click()
    cells = page.locator("#overview details td").all_text_contents()
    assert "(not shown)" in cells and SHOWN not in cells
    page.locator("#curves details > summary").click()
    # The browser sends the toggle event, which renders the other metrics, some time after the click.
    playwright.expect(page.locator("#curves h3", has_text="train/<i>odd</i>")).to_have_count(1)
    assert page.locator("script").count() == 2 and page.locator("img, u").count() == 0, "the data and the page's own"


def test_content_security_policy_forbids_other_scripts_and_connections(browser, file):
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(file.as_uri())
        page.evaluate(
            "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s)"
        )
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.broken = 2\">')")
        assert page.evaluate("fetch('data:,x').then(() => 'fetched', () => 'refused')") == "refused"
        assert page.evaluate("window.broken") is None


def test_search_finds_prompts_and_completions(page):
    search, count = page.locator("#search"), page.locator("#count")
    assert count.inner_text() == "3 of 3 prompts, 12 of 12 completions"
    search.fill("no idea")
    assert completions(page) == ["NO IDEA", "no idea"] and count.inner_text() == "1 of 3 prompts, 2 of 12 completions"
    assert page.locator("#rollouts .completion mark").all_inner_texts() == ["NO IDEA", "no idea"]
    search.fill("what is 6")
    assert count.inner_text() == "1 of 3 prompts, 4 of 12 completions"
    search.fill("nowhere at all")
    assert count.inner_text() == "0 of 3 prompts, 0 of 12 completions" and "No matching completions." in page.content()
    search.fill("</SCRIPT>")
    assert count.inner_text() == "2 of 3 prompts, 5 of 12 completions"


def test_order_and_filters(page):
    plain = page.locator("#rollouts .groups button", has_text="What is")
    plain.click()
    assert numbers(page, "advantage") == [3, -1, -1, -1.5]
    page.locator("#direction").click()
    assert numbers(page, "advantage") == [-1.5, -1, -1, 3]
    page.locator("#direction").click()
    page.locator("#sort").select_option("length")
    assert numbers(page, "tokens") == [12, 5, 4, 4]
    page.locator("#sort").select_option("reward")
    assert numbers(page, "reward") == [1, 0, 0, 0]
    page.locator("#filter").select_option("clipped")
    assert len(completions(page)) == 1 and page.locator("#count").inner_text().startswith("1 of 3 prompts, 1 of 12")
    assert page.get_by_text("truncated", exact=True).count() == 1
    page.locator("#filter").select_option("unscored")
    assert numbers(page, "reward") == [None] and page.locator(".tag", has_text="unscored").count() == 1
    page.locator("#filter").select_option("passed")
    assert page.locator("#count").inner_text() == "3 of 3 prompts, 3 of 12 completions"
    page.locator("#filter").select_option("failed")
    assert page.locator("#count").inner_text() == "3 of 3 prompts, 8 of 12 completions"
    page.locator("#filter").select_option("all")
    page.locator("#order").select_option("easy")  # successes: 1 of 3 scored, 1 of 4, 1 of 4
    assert page.locator("#rollouts .rate").all_inner_texts() == ["1/3", "1/4", "1/4"]
    page.locator("#order").select_option("hard")
    assert page.locator("#rollouts .rate").all_inner_texts() == ["1/4", "1/4", "1/3"]


def test_steps_and_runs(page):
    assert page.locator("#step option").all_inner_texts() == ["step 2", "step 4", "step 6", "all steps"]
    page.locator("#step").select_option("2")
    assert page.locator("#rollouts .groups").get_by_text("What is 2 + 2?").count() == 1
    page.locator("#step").select_option("all")
    assert page.locator("#count").inner_text() == "9 of 9 prompts, 36 of 36 completions"
    page.locator("#kept").select_option(label="held out")
    assert page.locator("#step option").all_inner_texts() == ["step 6", "all steps"]
    assert page.locator("#rollouts .groups").get_by_text("What is 100 + 100?").count() == 1
    page.locator("#run").select_option(label="second")
    assert page.locator("#kept option:checked").inner_text() == "training"
    page.locator("#step").select_option("8")
    assert page.locator("#rollouts .groups").get_by_text("What is 8 + 8?").count() == 1


def test_maze_is_drawn_with_the_path_of_the_model(page):
    page.locator("#rollouts .groups button", has=page.locator("svg.maze")).click()
    page.locator("#sort").select_option("sample")
    ways = page.eval_on_selector_all(".completion .walked", "all => all.map((each) => each.getAttribute('points'))")
    start = "1.5,1.5"
    assert ways == [
        f"{start} 2.5,1.5 3.5,1.5 3.5,2.5 3.5,3.5",
        f"{start} 2.5,1.5 3.5,1.5 3.5,2.5 3.5,1.5",
        start,
        start,
    ]
    assert page.locator(".completion svg.maze .stuck").count() == 3, "all but the one that solves it"


def test_trajectories_are_shown_turn_by_turn(browser, tmp_path):
    """Only sampled turns have the style of the model. Its tool calls are collapsed, and the search expands them."""
    out = tmp_path / "page.html"
    assert main(["report", str(write_trajectories(tmp_path / "run")), "--out", str(out)]) == 0
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(out.as_uri())
        card = page.locator("#rollouts .completion").first
        labels = card.locator(".role").all_inner_texts()
        assert labels == ["model", f"tool · {SHOWN}", "user", "model", "tool · find", "model", "<b>odd</b>", "model"]
        assert card.locator(".turn.theirs .role").all_inner_texts() == [each for each in labels if each != "model"]
        assert card.locator(".turn pre").first.text_content() == f"I look it up. {SHOWN}"
        assert card.locator(".turn.theirs pre").nth(1).text_content() == '<tool_call>{"name": "fake"}</tool_call>'
        assert card.locator("details").all_inner_texts() == [
            "tool call: find", "tool call: malformed", "tool call: malformed", "tool call: llama"
        ]  # fmt: skip
        colours = [
            card.locator(each).first.evaluate("e => getComputedStyle(e).backgroundColor")
            for each in (".turn:not(.theirs)", ".turn.theirs")
        ]
        assert colours[0] != colours[1]
        assert "sampled 25" in card.inner_text() and "turns 4" in card.inner_text()
        page.locator("#search").fill("needle")
        assert page.locator("#count").inner_text() == "1 of 1 prompts, 1 of 2 completions"
        assert page.locator("#rollouts details[open] mark").all_inner_texts() == ["needle"]
        page.locator("#search").fill("hay")
        assert page.locator("#rollouts .turn.theirs mark").all_inner_texts() == ["hay"]
        page.locator("#search").fill("")
        page.locator("#filter").select_option("failed")
        assert completions(page) == ["one turn"]
        assert page.locator('[data-key="train/turns/mean"]').count() == 1
        assert said == [] and page.locator("img, b b, u").count() == 0 and page.evaluate("window.broken") is None


def test_a_run_is_switched_off_and_on_in_every_chart(page):
    lines = page.locator('[data-key="train/rewards/mean"] path.line')
    assert lines.count() == 2
    chip = page.locator(".chip", has_text="second")
    chip.click()
    assert lines.count() == 1 and chip.get_attribute("aria-pressed") == "false"
    chip.click()
    assert lines.count() == 2


def test_smoothing_axis_and_slider_redraw_the_charts(page):
    line = page.locator('[data-key="train/rewards/mean"] path.line').first
    before = line.get_attribute("d")
    page.locator("#smooth").fill("0")
    plain = line.get_attribute("d")
    assert before != plain and page.locator('[data-key="train/rewards/mean"] path.raw').count() == 0
    button = page.locator('[data-key="train/rewards/mean"] .head button')
    button.click()
    assert line.get_attribute("d") != plain
    page.locator("#against").select_option("time")
    assert page.locator('[data-key="train/rewards/mean"] svg').get_by_text("20 s", exact=True).count() == 1
    last = page.locator('output[for="window"]').inner_text()
    page.locator("#window").fill("0")
    assert page.locator('output[for="window"]').inner_text() != last


def test_tooltip_shows_the_values_under_the_pointer(page):
    page.locator("#smooth").fill("0")
    plot = page.locator('[data-key="train/rewards/mean"] .plot')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 13, box["y"] + box["height"] / 2)
    said = page.locator(".tip").inner_text().split()
    assert said == ["step", "9", "<img", "src=x", "onerror=alert(1)>", "1", "second", "1"]


@pytest.mark.parametrize("width", [390, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_the_width_and_has_contrast(browser, file, width, scheme):
    """The page has no horizontal scrolling, and its text contrasts with the background."""
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        lightness = [sum(map(int, colour.split("(")[1].rstrip(")").split(",")[:3])) / 3 for colour in (ink, paper)]
        assert abs(lightness[0] - lightness[1]) > 150 and (lightness[1] > 128) == (scheme == "light")


def test_rewards_and_advantages_of_turns_are_shown(browser, tmp_path):
    turns = [[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}] * 2] * 2
    columns = {"reward": [1.5, 0.0], "advantage": [0.5, -0.5], "length": [4, 4], "finished": [True, True]}
    columns |= {"turns": turns, "turn_rewards": [[1.0, 0.5], [0.0, 0.0]]}
    columns |= {"turn_advantages": [[0.75, 0.25], [-0.75, -0.25]]}
    MetricsLog(tmp_path).write({"step": 1, "train/rewards/mean": 0.75})
    write_rollouts(tmp_path / "rollouts", 1, [Problem(0, "Find it.", [1], {})], ["ab", "ab"], columns)
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 0
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto(out.as_uri())
        labels = page.locator("#rollouts .completion").first.locator(".role").all_inner_texts()
    assert labels == ["model · reward 1 · advantage 0.75", "user", "model · reward 0.5 · advantage 0.25", "user"]
