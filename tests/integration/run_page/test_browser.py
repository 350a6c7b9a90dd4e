"""What a person sees of the page of runs, in a real browser."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from support import page_runs
from support.browser import PROGRAM, Tab

from cluster_tasks.node.dashboard import Dashboard
from trainer.chat.pictures import Limits, picture
from trainer.metrics.pictures import Thumbnails
from trainer.page import episodes
from trainer.page.bundle import one_file
from trainer.page.record import Record

AT = page_runs.AT
EVIL = page_runs.EVIL
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium on PATH (.ci/setup hosts installs it)")


def go(tab: Tab, asked: Dashboard, place: str, *shown: str) -> str:
    """The text of a page once it shows all of that: its parts arrive one by one."""
    tab.open(f"{asked.url}{AT}#/{place}")
    tab.until(f"{json.dumps(shown)}.every((words) => document.getElementById('main').innerText.includes(words))")
    return tab.text()


def test_a_person_finds_why_the_reward_fell_and_what_the_run_cost(served, tab):
    asked, _ = served
    tab.size(1280)
    go(tab, asked, "", "falls", "$5.50", "running", "step 61: learning", "alice")
    go(tab, asked, "run/falls", "Worth a look", "reward fell by", "at step 40")
    tab.run("[...document.querySelectorAll('button')].find((b) => b.textContent === 'what moved').click()")
    for words in ("answers are cut off by rollout.max_new_tokens", "rollout-1 died", "2 settings changed since"):
        tab.until(f"document.body.innerText.includes({json.dumps(words)})")
    tab.until("document.querySelectorAll('.chart canvas').length >= 6")


def test_episodes_are_filtered_and_one_is_read_token_by_token(served, tab):
    asked, _ = served
    go(tab, asked, "run/falls/episodes?order=worst&step=45", "16 found", "answer to")
    go(tab, asked, "run/falls/episodes?whole=1", "60 found")
    number = tab.run("document.querySelector('td a').textContent.replaceAll(',', '')")
    go(tab, asked, f"run/falls/episodes/{number}", "The same prompt over steps", "tool: 17", "prompt ")
    tab.until("document.querySelectorAll('.token').length === 80")
    shades = "new Set([...document.querySelectorAll('.token')].map((t) => t.style.background)).size"
    assert tab.run(shades) > 5
    tab.run("const s = document.getElementById('colour'); s.value = 'advantages'; s.dispatchEvent(new Event('change'))")
    assert tab.run(shades) == 1, "all tokens have the same advantage"
    assert "difference" in tab.run("document.querySelector('.token').title") or "policy" in tab.run(
        "document.querySelector('.token').title"
    )
    here = tab.run("location.hash")
    tab.press("]")
    tab.until(f"location.hash !== {json.dumps(here)}")


def test_prompts_machines_settings_events_and_comparisons_have_their_pages(served, tab):
    asked, _ = served
    go(tab, asked, "run/falls/prompts", "2 of 20 prompts never gave two different rewards")
    go(tab, asked, "run/falls/machines", "process 7 on gpu1")
    go(tab, asked, "run/falls/settings", "optim.lr")
    go(tab, asked, "run/falls/events", "rollout-1 died")
    go(tab, asked, "run/falls/timeline", "No step of this run was traced")
    go(tab, asked, "compare/steady,falls", "Settings that differ", "1e-06", "3e-06")
    go(tab, asked, "run/nobody", "no run 'nobody'")


def test_what_a_model_writes_is_never_run(served, tab):
    asked, root = served
    tab.said.clear()
    [name] = [folder.name for folder in root.iterdir() if folder.name.startswith("ünï")]
    go(tab, asked, "", "ünï")
    place = tab.run(f"encodeURIComponent({json.dumps(name)})")
    for part in ("", "/episodes", "/prompts", "/machines", "/settings", "/events"):
        go(tab, asked, f"run/{place}{part}", "ünï")
    number = episodes.page(root / name, {"step": "2"})["rows"][0]["id"]
    text = go(tab, asked, f"run/{place}/episodes/{number}", "Counted by the environment", EVIL)
    assert tab.run("document.querySelectorAll('main script, main img').length") == 0
    assert len(text) < 500_000, "ten megabytes of answer are drawn part by part"
    assert [word for word in tab.said if "404" not in word] == []


def test_a_run_without_steps_or_without_finite_numbers_has_a_page(served, tab):
    asked, _ = served
    tab.said.clear()
    go(tab, asked, "run/empty", "No step was logged yet.")
    go(tab, asked, "run/none%20finite", "not finite at step 1 and 7 more")
    assert tab.said == []


def test_the_page_is_live(served, tab):
    asked, root = served
    go(tab, asked, "run/steady", "step\n30 of 30")
    with (root / "steady/metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": 31, "reward": 0.987654}) + "\n")
    tab.until("document.body.innerText.includes('0.9877')", 60)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("place", ["", "run/falls", "run/falls/episodes", "run/falls/prompts", "compare/steady,falls"])
def test_each_page_fits_its_width_and_its_text_has_contrast(served, tab, theme, width, place):
    asked, _ = served
    tab.theme(theme)
    tab.size(width)
    tab.open("about:blank")
    go(tab, asked, place, "falls")
    tab.until("document.querySelectorAll('main *').length > 20")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "no part sticks out"
    assert tab.run("document.documentElement.dataset.theme") == theme
    assert tab.run(CONTRAST) == []


# Elements with text of their own whose colour has less than 4.5 to 1 against what is behind (WCAG 2.1, 1.4.3).
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] > 0.9) return c; }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    const words = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!words || !e.offsetParent || e.matches('option, .skip, .key')) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(e.outerHTML.slice(0, 120));
  }
  return bad.slice(0, 5);
})()"""


def test_the_keyboard_reaches_everything(served, tab):
    asked, _ = served
    tab.size(1280)
    go(tab, asked, "", "last word")
    tab.press("/")
    assert tab.run("document.activeElement.id") == "search"
    tab.press("Escape")
    reached = set()
    for _ in range(30):
        tab.press("Tab")
        reached.add(tab.run("document.activeElement.textContent || document.activeElement.ariaLabel || document.activeElement.id"))
    assert {"falls", "steady", "compare falls", "Theme", "search"} <= reached
    tab.run("[...document.querySelectorAll('a')].find((a) => a.textContent === 'falls').focus()")
    tab.press("Enter")
    tab.until("document.body.innerText.includes('Worth a look')")
    tab.press("u")
    tab.until("document.body.innerText.includes('Compare chosen runs')")


def test_one_file_shows_the_same_offline(served, tab, tmp_path):
    _, root = served
    file = tmp_path / "report.html"
    file.write_text(one_file([root / "falls", root / "steady"]), encoding="utf-8")
    tab.said.clear()
    tab.open("about:blank")
    tab.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    try:
        tab.open(f"{file.as_uri()}#/run/falls")
        tab.until("document.body.innerText.includes('Worth a look')")
        tab.until("document.querySelectorAll('.chart canvas').length >= 5")
        tab.run("[...document.querySelectorAll('button')].find((b) => b.textContent === 'what moved').click()")
        tab.until("document.body.innerText.includes('rollout.max_new_tokens')")
        for place, words in (
            ("run/falls/episodes?order=worst", "found"),
            ("run/falls/prompts", "never gave"),
            ("compare/falls,steady", "Settings that differ"),
        ):
            tab.run(f"location.hash = '#/{place}'")
            tab.until(f"document.body.innerText.includes({json.dumps(words)})")
        assert tab.said == []
    finally:
        tab.ask("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)


def test_pictures_stand_beside_the_words(served, tab, tmp_path):
    """A report of its own, whose pictures have a place that would run as HTML."""
    folder = tmp_path / "seen"
    folder.mkdir()
    (folder / "run.yaml").write_text("run: {name: seen}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0, "seconds": 1.0}\n')
    shots = [picture(Image.new("RGB", (300, 30 + i)), EVIL, Limits()) for i in range(3)]
    Thumbnails(folder).keep(shots[:2])
    shown = [one.described() for one in shots]
    with Record(folder) as record:
        turns = [{"sampled": False, "text": "look", "pictures": shown[1:]}]
        record.add(1, [{"prompt": 1, "reward": 1.0, "whole": {"prompt": "p", "pictures": shown[:1], "turns": turns}}])
    (tmp_path / "report.html").write_text(one_file([folder]), encoding="utf-8")
    tab.said.clear()
    tab.open(f"{(tmp_path / 'report.html').as_uri()}#/run/seen/episodes/1")
    tab.until("document.querySelectorAll('.pictures img').length === 2")
    tab.until("[...document.querySelectorAll('.pictures img')].every((image) => image.complete && image.naturalWidth === 256)")
    assert tab.run("document.querySelector('.environment .pictures img').title").startswith(EVIL)
    assert "a picture that is not kept" in tab.text()
    assert tab.run("document.querySelectorAll('img').length") == 2
    assert tab.said == []
