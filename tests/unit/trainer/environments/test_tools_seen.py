"""Tools that return pictures: a plot, a screenshot; and prompts of rows with pictures, in the environment `tools`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.seeing import PLACE, of_qwen, seen
from support.talks import CHARACTERS, CHATML, Talk, with_template

from trainer.chat.pictures import Picture
from trainer.chat.tokenizer import character_tokenizer
from trainer.environments import toolbox
from trainer.environments.eyes import Eyes
from trainer.environments.policy import Misuse, Policy
from trainer.environments.tools import tools

CALL = '<tool_call>{"name": "look", "arguments": {"what": "%s"}}</tool_call>'
FIRST, SECOND = seen(1), seen(2, (64, 32))


def look(what: str) -> Any:
    """
    Look.

    Args:
        what: what
    """
    return {
        "image": FIRST.image(),
        "bytes": SECOND.encoded(),
        "parts": ["a long text" * 9, FIRST.image(), {"type": "text", "text": "end"}, {"type": "image", "image": SECOND.encoded()}, 5],
        "damaged": SECOND.encoded()[:100],
        "path": {"type": "image", "path": "/etc/passwd"},
        "mark": "<|image_pad|>",
        "numbers": [1, 2],
    }[what]


def talked(
    *texts: str, tokenizer: Any = None, shown: tuple[Picture, ...] = (), prompt: Any = "1+1", longest: int = 20, **settings: Any
) -> Talk:
    talk = Talk(tokenizer or of_qwen(), *texts, turn_tokens=200, tokens=9999)
    talk.policy.eyes = Eyes(talk.tokenizer, shown)

    async def once(policy: Policy) -> None:
        given = settings or {"look": {"kind": "function", "path": f"{__name__}:look"}}
        try:
            await tools(policy, {"prompt": prompt, "answer": "2"}, given, reward="exact", max_observation=longest)
        finally:
            toolbox.close()

    talk.run(once)
    return talk


@pytest.mark.parametrize(
    ("what", "says", "pictures"),
    [
        ("image", PLACE, [FIRST]),
        ("bytes", PLACE, [SECOND]),
        ("parts", f"a long tex\n... 79 characters left out ...\n long text{PLACE}end{PLACE}5", [FIRST, SECOND]),
        ("numbers", "[1, 2]", []),
    ],
)
def test_what_a_tool_returns_is_shown(what, says, pictures):
    talk = talked(CALL % what, "2")
    [spoken] = talk.policy.sequences
    assert [one.image().tobytes() for one in spoken.pictures] == [one.image().tobytes() for one in pictures]
    assert talk.policy.metrics == {"calls": 1}
    own = talk.policy.eyes.expanded(f"\n[tool]{says}<eos>\n[assistant]", spoken.pictures)
    assert talk.tokenizer.decode(spoken.turns[1].token_ids) == own


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("damaged", "error: Unreadable: what look returned: the picture is damaged"),
        ("path", "error: Unreadable: what look returned: '/etc/passwd' is a path"),
        ("mark", "error: Unreadable: what look returned: its text has the token that stands for a picture"),
    ],
)
def test_a_picture_that_is_none_is_an_error_that_the_policy_reads(what, error):
    talk = talked(CALL % what, "2", longest=200)
    [spoken] = talk.policy.sequences
    assert str(talk.tokenizer.decode(spoken.turns[1].token_ids)).startswith(f"\n[tool]{error}") and not spoken.pictures
    assert talk.policy.metrics == {"calls": 1, "failed_calls": 1}


def test_a_text_model_with_a_tool_that_returns_a_picture_ends_the_run():
    with pytest.raises(Misuse, match="what look returned has a picture: the policy has no processor that reads pictures"):
        talked(CALL % "image", "2", tokenizer=with_template(character_tokenizer(CHARACTERS), CHATML))


def test_an_mcp_server_s_picture_is_shown(tmp_path):
    FIRST.image().save(tmp_path / "shot.png")
    (tmp_path / "shots.py").write_text(
        "import base64, pathlib\n"
        "from mcp.server import MCPServer\n"
        "from mcp.types import ImageContent, TextContent\n"
        "server = MCPServer('shots')\n"
        "@server.tool()\n"
        "def look(what: str) -> list[ImageContent | TextContent]:\n"
        f"    data = base64.b64encode(pathlib.Path({str(tmp_path / 'shot.png')!r}).read_bytes()).decode()\n"
        "    return [TextContent(type='text', text=what), ImageContent(type='image', data=data, mime_type='image/png')]\n"
        "server.run()\n"
    )
    talk = talked(CALL % "page", "2", shots={"kind": "mcp", "command": [sys.executable, str(tmp_path / "shots.py")]})
    [spoken] = talk.policy.sequences
    assert [one.image().tobytes() for one in spoken.pictures] == [FIRST.image().tobytes()]
    assert str(talk.tokenizer.decode(spoken.turns[1].token_ids)).startswith("\n[tool]page<|vision_start|>")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("which?", f"{PLACE}{PLACE}which?"),
        ("is <image> like <image>?", f"is {PLACE} like {PLACE}?"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, FIRST.described(), SECOND.described()]}],
            f"a{PLACE}{PLACE}",
        ),
    ],
)
def test_a_row_s_pictures_are_in_the_first_message(prompt, says):
    talk = talked("2", shown=(FIRST, SECOND), prompt=prompt)
    [spoken] = talk.policy.sequences
    assert spoken.prompt_pictures == (FIRST, SECOND)
    assert talk.policy.eyes.expanded(f"[user]{says}<eos>", spoken.pictures) in talk.tokenizer.decode(spoken.prompt_ids)


def test_a_sequence_that_shows_other_pictures_is_another_one():
    talk = Talk(of_qwen(), "1", "2", "3", "4")

    async def once(policy: Policy) -> None:
        await policy.generate(["a", FIRST.image(), "b"])
        await policy.generate(["a", FIRST.image(), "b1", SECOND.image()])
        await policy.generate(["a", SECOND.image(), "b1", SECOND.image(), "2"])  # of the same words
        await policy.generate(["a", SECOND.image(), "b", "1", SECOND.image(), "23", Image.new("RGB", (16, 16))])

    talk.run(once)
    assert [len(spoken.pictures) for spoken in talk.policy.sequences] == [2, 3]
    assert [len(spoken.turns) for spoken in talk.policy.sequences] == [3, 3]


def test_a_conversation_whose_picture_was_replaced_is_another_one():
    talk = Talk(of_qwen(), "1", "2", "3")

    async def once(policy: Policy) -> None:
        for shot in (FIRST, FIRST, SECOND):
            messages = [{"role": "user", "content": [{"type": "image", "image": shot.image()}]}]
            if policy.turns:
                messages += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "go"}]
            await policy.chat(messages)

    talk.run(once)
    assert [[one.where for one in spoken.pictures] for spoken in talk.policy.sequences] == [["message 0"], ["message 0"]]
    assert [spoken.pictures[0].encoded() for spoken in talk.policy.sequences] == [FIRST.encoded(), SECOND.encoded()]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["a", 5], "the context of turn 1: int is no picture; give a path, bytes, a data: URL or a PIL image"),
        (["a", {"type": "image", "hash": "unknown"}], "the context of turn 1: a part of type image without a picture"),
        ([{"type": "image", "path": "a.png"}], "the context of turn 1: 'a.png' is a path, and no file is read here"),
        ("a <|image_pad|>", r"the context of turn 1: its text has the token that stands for a picture"),
        (
            [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
            "the context of turn 1: 'https://a.b/c.png' is a URL, and nothing is fetched",
        ),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(given, error):
    async def once(policy: Policy) -> None:
        await policy.generate(given)

    with pytest.raises(ValueError, match=f"^{error}"):
        Talk(of_qwen(), "1").run(once)


def test_ids_that_stand_for_pictures_need_the_pictures():
    talk = Talk(of_qwen(), "1", "2")
    ids = talk.ids(talk.policy.eyes.expanded(PLACE, [FIRST]))

    async def without(policy: Policy) -> None:
        await policy.generate(ids)

    with pytest.raises(ValueError, match=r"^9 tokens that stand for pictures, where 0 pictures have 0"):
        talk.run(without)

    async def known(policy: Policy) -> None:
        answer = await policy.generate([FIRST.image()])
        await policy.generate([*ids, *answer.token_ids, 5, 6])

    talk.run(known)
    assert [len(request.pictures) for request in talk.requests] == [1, 1]


def test_the_folder_of_the_data_is_where_paths_are(tmp_path):
    from trainer.chat.pictures import Limits

    FIRST.image().save(tmp_path / "a.png")
    talk = Talk(of_qwen(), "1")
    talk.policy.eyes = Eyes(talk.tokenizer, limits=Limits(folder=tmp_path))

    async def once(policy: Policy) -> None:
        with pytest.raises(ValueError, match=r"message 0: \.\./b\.png is outside"):
            await policy.chat([{"role": "user", "content": [{"type": "image", "path": "../b.png"}]}])
        await policy.chat([{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "image", "image": Path("a.png")}]}])

    talk.run(once)
    assert [one.where for one in talk.requests[0].pictures] == ["a.png", "a.png"]
