"""What `transformers` answers to fixed prompts, computed once in fp32 and kept: `python -m tests.cluster.reference`.

Kept by the hash of the weights, so that another checkpoint cannot be compared with the wrong answers. A *tie* is a step
whose two best logits are closer than 1e-4: there either token is right, and what follows it is not compared.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from disagg.convert.model_dir import resolve
from disagg.convert.safetensors_file import find_weight_files
from disagg.text.tokenizer import Tokenizer

TIE = 1e-4
SAMPLE_BYTES = 64 * 1024
KEPT = Path(__file__).parent / "reference"

WORDS = {
    "who": [
        "keeper",
        "widow",
        "pilot",
        "clerk",
        "sister",
        "engineer",
        "stranger",
        "gardener",
        "child",
        "professor",
        "smuggler",
        "nurse",
    ],
    "did": [
        "carried",
        "forgot",
        "painted",
        "measured",
        "buried",
        "repaired",
        "answered",
        "followed",
        "sold",
        "counted",
        "folded",
        "refused",
    ],
    "what": [
        "lantern",
        "ledger",
        "engine",
        "letter",
        "map",
        "violin",
        "boat",
        "clock",
        "fence",
        "telescope",
        "basket",
        "bridge",
    ],
    "where": [
        "harbour",
        "orchard",
        "cellar",
        "station",
        "mountain",
        "library",
        "desert",
        "kitchen",
        "island",
        "theatre",
        "market",
        "tunnel",
    ],
    "how": [
        "slowly",
        "twice",
        "at",
        "dawn",
        "without",
        "a",
        "word",
        "in",
        "anger",
        "for",
        "eleven",
        "days",
        "by",
        "candlelight",
        "against",
        "advice",
    ],
    "verb": ["merge", "split", "load", "parse", "count", "rank", "filter", "reverse", "encode", "flatten"],
    "noun": ["items", "rows", "tokens", "pages", "queue", "tree", "buffer", "words", "edges", "prices"],
}
FOREIGN = (
    "서울의 겨울은 길고 조용하다.",
    "할머니는 아침마다 시장에서 생선을 고른다.",
    "東京の朝は早く、電車は静かに動き出す。",
    "彼女は窓を開けて、遠い山を見つめた。",
    "Зимой река замерзает, и дети катаются на коньках.",
    "Инженер долго искал ошибку в чертежах моста.",
    "في الصباح يفتح البائع دكانه ويرتب الفاكهة.",
    "北京的胡同里有很多故事。",
    "Οι γάτες κοιμούνται στον ήλιο.",
    "Der Zug nach Bremen hat heute zwölf Minuten Verspätung.",
    "La señora compró tres melones y un paraguas azul.",
    "हर शाम बच्चे नदी के किनारे पतंग उड़ाते हैं।",
    "🚂🌧️ déjà vu, naïve façade — 12 €",
)


def prose(rng: random.Random) -> str:
    pick = {kind: rng.choice(words) for kind, words in WORDS.items()}
    other = rng.choice(WORDS["where"])
    return rng.choice(
        (
            "The {who} {did} the {what} near the {where}, and nobody in the {other} asked why. ",
            "When the {who} reached the {where}, the {what} was gone; only the {other} remained. ",
            '"I {did} it {how}," said the {who}, "and the {what} never left the {where}." ',
            "In {year} a {who} from the {other} {did} every {what} that came through the {where}. ",
        )
    ).format(**pick, other=other, year=rng.randrange(1400, 2100))


def code(rng: random.Random) -> str:
    verb, noun, other = rng.choice(WORDS["verb"]), rng.choice(WORDS["noun"]), rng.choice(WORDS["noun"])
    number, operator = rng.randrange(2, 999), rng.choice(("+", "-", "*", "//", "%", "^"))
    return rng.choice(
        (
            f"def {verb}_{noun}({noun}, limit={number}):\n    out = []\n    for i, each in enumerate({noun}):\n"
            f"        if each {operator} i > limit:\n            out.append(each)\n    return out\n\n",
            f"{noun} = [x {operator} {number} for x in range({number * 3}) if x % {number % 7 + 2}]\n",
            f"class {noun.title()}{verb.title()}:\n    def __init__(self, {other}):\n        self._{other} = {other}\n\n",
            f"SELECT {noun}, COUNT({other}) FROM {verb}_log WHERE id {operator} {number} = 0 GROUP BY {noun};\n",
        )
    )


def foreign(rng: random.Random) -> str:
    return rng.choice(FOREIGN) + rng.choice((" ", "\n", f" ({rng.randrange(1000)}) "))


def numbers(rng: random.Random) -> str:
    day = f"20{rng.randrange(10, 40)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    return rng.choice(
        (f"{rng.randrange(10**6)}, ", f"{rng.random():.6f}; ", f"{day}T{rng.randrange(24):02}:00:00Z\t", prose(rng))
    )


KINDS = (prose, code, foreign, numbers)

BOUNDARY_LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 200)
BOUNDARY_OUTPUTS = 24
LONG_OUTPUTS = 64


class Answer(Struct, frozen=True):
    """gaps: the difference of the two best logits at each output."""

    prompt: tuple[int, ...]
    outputs: tuple[int, ...]
    gaps: tuple[float, ...]


class Kept(Struct, frozen=True):
    weights_hash: str
    answers: tuple[Answer, ...]


def boundary_prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Twelve prompts whose lengths sit on and beside pages of 16 and chunks of 64."""
    return [_prompt(tokenizer, i, length) for i, length in enumerate(BOUNDARY_LENGTHS)]


def long_prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Sixty-four prompts of 1 to 900 tokens: prose, code, other scripts, numbers."""
    return [_prompt(tokenizer, 100 + i, 1 + (i * 577) % 900) for i in range(64)]


def _prompt(tokenizer: Tokenizer, number: int, length: int) -> tuple[int, ...]:
    """Text that does not repeat itself, so that what comes next depends on all of it; cut to exactly `length` tokens."""
    rng = random.Random(number)
    ids: list[int] = []
    while len(ids) < length:
        ids += tokenizer.encode(KINDS[number % len(KINDS)](rng), add_special_tokens=False)
    return tuple(ids[:length])


def compute(model_dir: Path, prompts: list[tuple[int, ...]], outputs: int) -> tuple[Answer, ...]:
    """Greedy `generate`, each prompt alone, fp32, not stopping at EOS. Says how far it is."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    answers = []
    started = time.monotonic()
    for number, prompt in enumerate(prompts, start=1):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=outputs,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack([logits[0].float().topk(2).values for logits in result.logits])
        answers.append(
            Answer(
                prompt,
                tuple(result.sequences[0, len(prompt) :].tolist()),
                tuple(round(gap, 6) for gap in (best[:, 0] - best[:, 1]).tolist()),
            )
        )
        print(f"\r{number}/{len(prompts)} prompts, {time.monotonic() - started:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    return tuple(answers)


def checkpoint_hash(model_dir: Path) -> str:
    """Tells whether the kept answers are of this checkpoint: configuration, headers, and both ends of each file."""
    digest = hashlib.sha256(hashlib.sha256((model_dir / "config.json").read_bytes()).digest())
    for path in find_weight_files(model_dir):
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            file_bytes = path.stat().st_size
            digest.update(msgspec.json.encode((path.name, file_bytes, len(header))) + header)
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, file_bytes - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def load(name: str, model_dir: Path) -> tuple[Answer, ...]:
    """The kept answers; refuses those of other weights."""
    kept = msgspec.json.decode((KEPT / f"{name}.json").read_bytes(), type=Kept)
    weights_hash = checkpoint_hash(model_dir)
    assert kept.weights_hash == weights_hash, f"{name}.json was computed with other weights: run it anew"
    return kept.answers


def compare(answer: Answer, outputs: list[int]) -> tuple[int, int, str]:
    """(steps compared, ties met, what is wrong or ""). After a tie that went the other way nothing is compared."""
    ties = 0
    for step, (ours, theirs, gap) in enumerate(zip(outputs, answer.outputs, answer.gaps, strict=True)):
        tie = gap < TIE
        ties += tie
        if ours != theirs:
            if tie:
                return step + 1, ties, ""
            return step + 1, ties, f"output {step} is {ours} where transformers says {theirs} (gap {gap})"
    return len(outputs), ties, ""


def main() -> None:
    model_dir = resolve("smollm2-135m", Path("~/.cache/disagg/models").expanduser())
    tokenizer = Tokenizer.load(model_dir)
    weights_hash = checkpoint_hash(model_dir)
    KEPT.mkdir(exist_ok=True)
    for name, prompts, outputs in (
        ("boundary", boundary_prompts(tokenizer), BOUNDARY_OUTPUTS),
        ("long", long_prompts(tokenizer), LONG_OUTPUTS),
    ):
        kept = Kept(weights_hash, compute(model_dir, prompts, outputs))
        (KEPT / f"{name}.json").write_text(json.dumps(msgspec.to_builtins(kept)) + "\n")


if __name__ == "__main__":
    main()
