# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Beginnings of user turns that steer a target's self-written prompts towards the kinds of request people make.

A target that writes its own prompts from nothing writes mostly chat. A turn that begins like a request for code, a
calculation, a translation or a summary is continued as one, in the target's own words; its answers then cover what a
drafter meets in use. `stdlib_functions` adds what needs no writing: functions of the Python standard library to be
completed.
"""

import ast
import random
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

from .chat import RecordingError, derive_seed
from .self_prompting import WantedTurns


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("""
    Anna Ben Carlos Dana Elif Felix Grace Hamid Ines Jonas Kira Leo Mona Nils Olga Peter Rosa Sam Tara Uma Victor
    Wendy Yusuf Zoe Maria Tom Lucy Jack Emma Henry
""")
THINGS = _words("""
    apples books marbles pencils cookies stamps tickets flowers bottles boxes candies chairs stickers eggs coins
    balloons shirts cards toys oranges plants bags puzzles cupcakes
""")
PLACES = _words("""
    London Paris Chicago Tokyo Berlin Madrid Sydney Toronto Nairobi Mumbai Cairo Rome Lima Seoul Boston Denver
    Athens Vienna Dublin Oslo Texas Florida Manchester Moscow Beijing Brazil Kenya Scotland Canada Pakistan
""")
TOPICS = _words("""
    volcano bridge railway glacier parliament orchestra vaccine desert submarine coffee cathedral whale satellite
    novel museum festival river university battle treaty protein battery telescope harbour forest stadium castle
    insect mineral language planet empire canal theatre comet wheat copper virus engine island lighthouse symphony
    painter dynasty election bacteria cricket airport mountain earthquake
""")
VERBS = _words("""
    find count get is sum remove sort max check reverse add filter merge parse convert split compute replace group
    flatten rotate encode decode validate generate unique common longest shortest min total
""")
NOUNS = _words("""
    list string numbers words elements digits matrix array values pairs prime even odd vowels characters items
    intervals duplicates substring sequence integer letters index triples range
""")

# Slots in braces are filled at random. What follows is the target's.
OPENINGS: dict[str, tuple[str, ...]] = {
    "code": (
        "Complete this Python function so that its tests pass:\n```python\ndef {verb}_{noun}(",
        "Complete this Python function:\n```python\nfrom typing import List\n\n\ndef {verb}_{noun}(",
        'Implement the function:\n```python\n\ndef {verb}_{noun}({noun}):\n    """',
        'Write the body of this function:\n```python\n\ndef {verb}_{noun}(s):\n    """\n    You are given',
        'Write the body of this function:\n```python\n\ndef {verb}_{noun}(lst, n):\n    """\n    Return',
        "Write a Python function that {verb}s",
        "Write a Python program to",
        "Implement a function in Python which takes",
    ),
    "tool_call": (
        "Find the",
        "Find the {noun} of",
        "Calculate the",
        "Calculate the area of",
        "What is the",
        "What's the",
        "Get the",
        "How much",
        "How many",
        "I want to find",
        "Retrieve the",
        "Predict the",
        "Determine the",
        "Book a",
        "Give me the",
        "Which",
        "Compute the {noun} of",
        "Look up the",
        "Convert {number}",
        "What is the current",
        "Find a {topic} near {place}",
        "Estimate the",
        "Get me information about the {topic} in {place}",
        "How long does it take",
        "What would be the",
        "Solve",
    ),
    "math": (
        "{name} has {number} {thing}.",
        "{name} buys {number} {thing}",
        "{name} and {other} have",
        "A {topic} costs ${number}.",
        "There are {number} {thing} in",
        "If {name} has",
        "{name} earns ${number} per hour",
        "{name} is {number} years old.",
        "A train travels {number} miles",
        "{name} decides to",
        "In a class of {number} students,",
        "{name} wants to buy",
        "A farmer has {number}",
        "It takes {name} {number} minutes to",
        "{name}'s {number} {thing}",
        "Every day {name}",
        "A store sells {thing} for ${number}",
        "{name} reads {number} pages",
        "The school bought {number} {thing}",
        "{name} is driving from {place} to",
    ),
    "qa": (
        "Who",
        "Who played",
        "Who wrote",
        "Who was the first",
        "When did",
        "When was the",
        "Where is",
        "Where does the",
        "What is the name of the",
        "What does",
        "What type of",
        "What is the largest {topic}",
        "How many",
        "How did the {topic}",
        "Why was the",
        "Which country",
        "When is the",
        "Who sings",
        "Who is the current",
        "What was the name of the {topic} in {place}",
        "The first {topic} in {place} was",
        "Which {topic} is",
        "Who won the",
        "In which year did",
        "What part of the",
    ),
    "summarization": (
        "Summarize: {place} (Reuters) -",
        "Summarize: A {number}-year-old man from {place}",
        "Summarize: {name}, a",
        "Summarize: The {place} government",
        "Summarize: Police in {place}",
        "Summarize: The {topic} has been",
        "Summarize: Scientists have",
        "Summarize: By {name}",
        "Summarize: Manager {name}",
        "Summarize: It was a",
        "Summarize: The owner of a {topic}",
        "Summarize: A woman who",
        "Summarize: Thousands of people",
        "Summarize: When {name} and {other}",
        "Summarize the following article: The",
        "Summarize this text: {topic}",
    ),
    "translation": (
        "Translate German to English: Die",
        "Translate German to English: Der",
        "Translate German to English: Das",
        "Translate German to English: In",
        "Translate German to English: Nach",
        "Translate German to English: Ein",
        "Translate German to English: Es",
        "Translate German to English: Wir",
        "Translate German to English: Im",
        "Translate German to English: Mit",
        "Translate German to English: „",
        "Translate German to English: Er sagte , dass",
        "Translate German to English: Auch",
        "Translate German to English: Bei",
        "Translate German to English: {name} ist",
        "Translate German to English: Seit",
        "Translate German to English: Sie",
        "Translate German to English: Für",
        "Translate German to English: Noch",
        "Translate German to English: Am",
        "Translate German to English: {number} Menschen",
        "Translate German to English: Wenn",
        "Translate German to English:",
        "Translate French to English: Le",
        "Translate Spanish to English: El",
        "Translate the following German sentence to English: Die",
    ),
    "chat": (
        "Write a",
        "Write a persuasive",
        "Write a short story about a {topic}",
        "Compose a",
        "Explain",
        "Describe the",
        "Imagine you are",
        "Help me",
        "Act as a",
        "Discuss the",
        "Compare",
        "Give me an example of",
        "Can you",
        "Suppose",
        "You are a",
        "What are the differences between",
        "Could you write a captivating",
        "Draft a professional email",
        "Provide",
        "How would you",
        "Design a",
        "Given the following",
        "Read the paragraph below and answer the questions:",
        "Pretend",
        "Please",
        "",
    ),
}
QUESTION_WORDS = (
    "Who",
    "What",
    "When",
    "Where",
    "How",
    "Which",
    "Why",
    "What is the",
    "When did",
    "Who was the",
    "How many",
)
# A passage is written like one to be summarised; a question about it comes from a second turn.
PASSAGES = (
    "{topic}s The {topic} is a",
    "The {place} {topic} is",
    "{place} {topic}s The",
    "{name} {other} is an American",
    "History of the {topic} The",
    "The economy of {place}",
)
SECOND_TURNS = (
    "Can you explain that in more detail?",
    "Rewrite your previous answer in a shorter form.",
    "Give me another example.",
    "Now make it more formal.",
    "What are the disadvantages?",
    "Can you summarize your answer in one sentence?",
    "How would you test that?",
    "Rewrite it as a list of bullet points.",
)
STOP_WORDS = frozenset(
    _words("""
    the and for with from that this what which who how much many does did are was were you your can could would will
    its has have had all any each into than then there their them they but not out over under
""")
)
CUT_ANYWHERE = ("rag", "summarization")
DOMAINS = ("code", "tool_call", "math", "qa", "rag", "summarization", "translation", "chat")


def domain_openings(domain: str, n: int, seed: int = 0) -> list[str]:
    """
    Beginnings of `n` user turns.

    Args:
        domain (`str`): One of `DOMAINS`. Of `"rag"` they are the beginnings of the passages.
        n (`int`): How many.
        seed (`int`, *optional*, defaults to `0`): Seed of the fillings.

    Raises:
        RecordingError: If there is no such domain.
    """
    check_domains([domain])
    templates = PASSAGES if domain == "rag" else OPENINGS[domain]
    rng = random.Random(derive_seed(seed, "openings", domain))
    return [_fill(templates[index % len(templates)], rng) for index in range(n)]


def question_openings(passages: list[str], seed: int = 0) -> list[str]:
    """User turns of one or two passages of the list each and a question's first words."""
    rng = random.Random(derive_seed(seed, "questions"))
    openings = []
    for number, passage in enumerate(passages):
        texts = [passage] if number % 2 else [passages[rng.randrange(len(passages))], passage]
        openings.append("\n".join([*texts, rng.choice(QUESTION_WORDS)]))
    return openings


def check_domains(domains) -> None:
    """Raises a `RecordingError` for a name that is no domain."""
    if unknown := [name for name in domains if name not in DOMAINS]:
        raise RecordingError(f"Unknown domain {unknown[0]!r}, expected some of {', '.join(DOMAINS)}, or `all`.")


def _fill(template: str, rng: random.Random) -> str:
    name, other = rng.sample(NAMES, 2)
    text = template.format(
        name=name,
        other=other,
        thing=rng.choice(THINGS),
        place=rng.choice(PLACES),
        topic=rng.choice(TOPICS),
        verb=rng.choice(VERBS),
        noun=rng.choice(NOUNS),
        number=rng.choice([*range(2, 21), 24, 25, 30, 36, 40, 45, 48, 50, 60, 75, 80, 100, 120, 150, 200, 500]),
    )
    return text[:1].upper() + text[1:]


def stdlib_functions(n: int, seed: int = 0, folder: str | Path | None = None) -> list[str]:
    """
    User turns that ask for the body of a function of the Python standard library, from its signature and docstring.

    Args:
        n (`int`): At most so many, drawn without replacement.
        seed (`int`, *optional*, defaults to `0`): Seed of the draw.
        folder (`str` or `Path`, *optional*): Where the `.py` files are, by default this interpreter's own library.
    """
    folder = Path(folder or sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for file in sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")]):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        for name, text in _documented_functions(file):
            found.setdefault(name, text)
    texts = [found[name] for name in sorted(found)]
    return random.Random(derive_seed(seed, "stdlib")).sample(texts, min(n, len(texts)))


def _documented_functions(file: Path):
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if doc and 30 <= len(doc) <= 600 and node.args.args:
            body = "\n".join(f"    {line}".rstrip() for line in doc.splitlines()).lstrip()
            yield (
                node.name,
                (
                    "Complete this Python function so that its tests pass:\n```python\n"
                    f'def {node.name}({ast.unparse(node.args)}):\n    """{body}\n    """\n```'
                ),
            )


def function_for(turn: str) -> dict:
    """
    The schema of a function that a request could be answered with, made of the request's own words.

    Example: "Find the area of a triangle with base 10" gives `find_area_triangle` with a parameter `base`.
    """
    words = [word for word in re.findall(r"[a-z]+", turn.lower()) if len(word) > 2 and word not in STOP_WORDS]
    words = list(dict.fromkeys(words)) or ["answer"]
    name, rest = words[:3], words[3:6] or words[-1:]
    kind = "integer" if re.search(r"\d", turn) else "string"
    properties = {
        word: {"type": kind if place == 0 else "string", "description": f"The {word} of the {name[-1]}."}
        for place, word in enumerate(rest)
    }
    return {
        "name": "_".join(name),
        "description": f"{turn.split('.')[0][:80].strip()}.",
        "parameters": {"type": "object", "properties": properties, "required": rest[:1]},
    }


def steered_prompts(
    write: Callable[[list[WantedTurns]], list[list[str]]], n: int, domains=DOMAINS, seed: int = 0
) -> list[dict]:
    """
    Prompts of several domains in equal shares, mixed so that every part of the list holds them alike.

    Args:
        write (`Callable[[list[WantedTurns]], list[list[str]]]`): Writes user turns of several kinds.
        n (`int`): Number of prompts wanted, all domains together.
        domains (`Iterable[str]`, *optional*): Names out of `DOMAINS`.
        seed (`int`, *optional*, defaults to `0`): Seed of all draws.

    Returns:
        `list[dict]`: rows with `id` (`"code-17"`) and `turns`; of `"chat"` every third has a second turn, of
        `"tool_call"` all have `tools`.
    """
    domains = list(domains)
    check_domains(domains)
    turns = {name: stdlib_functions(n // len(domains) // 3, seed) if name == "code" else [] for name in domains}
    shares = [n // len(domains) + (index < n % len(domains)) for index in range(len(domains))]
    wanted = {name: share - len(turns[name]) for name, share in zip(domains, shares) if share > len(turns[name])}
    # A passage may be cut anywhere.
    kinds = [
        WantedTurns(number, domain_openings(name, 2 * number, seed), derive_seed(seed, name), name in CUT_ANYWHERE)
        for name, number in wanted.items()
    ]
    for name, written in zip(wanted, write(kinds) if kinds else []):
        if name == "rag" and written:
            questions = question_openings(written, seed)
            own = derive_seed(derive_seed(seed, name), "question")
            (written,) = write([WantedTurns(wanted[name], questions, own)])
        turns[name] += written
    rows: list[tuple[float, dict]] = []
    for index, name in enumerate(domains):
        for number, turn in enumerate(turns[name]):
            row: dict = {"id": f"{name}-{number}", "turns": [turn]}
            if name == "tool_call":
                row["tools"] = [function_for(turn)]
            if name == "chat" and number % 3 == 0:
                row["turns"] = [turn, SECOND_TURNS[number // 3 % len(SECOND_TURNS)]]
            # Evenly spread over the list, each domain with its own offset.
            rows.append(((number + (index + 0.5) / len(domains)) / len(turns[name]), row))
    return [row for _, row in sorted(rows, key=lambda item: item[0])]
