"""lm-eval over HTTP, and its own `hf` backend in float32 on the same model: the same numbers within 1e-3."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from feature import BASE, KEY, V1, equal, feature

os.environ["OPENAI_API_KEY"] = KEY
MODEL = os.environ["MANYLORA_MODEL_PATH"]
TOLERANCE = 1e-3
BATCH = 18
UNTIL = [".", "!", "?", "\n", "<|end|>"]
QUESTIONS = (
    "When are you open?",
    "Can I return something?",
    "How long does shipping take?",
    "Is the scarf warm?",
)
folder = Path(tempfile.mkdtemp())
documents = [
    {"question": f"{question} {number}", "answer": "We are open."}
    for number in range(5)
    for question in QUESTIONS
]
(folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "num_fewshot": 0,
}
TASKS: dict[str, dict[str, Any]] = {
    "manylora_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": ["We are open.", "No.", "You can return anything within 30 days."],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "manylora_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{answer}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "manylora_until": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": UNTIL,
            "max_gen_toks": 24,
            "do_sample": False,
            "temperature": 0,
        },
        "metric_list": [{"metric": "exact_match"}],
    },
}
for name, task in TASKS.items():
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))


def run(backend: str, **arguments: Any) -> dict[str, list[Any]]:
    """Answers to each document of each task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    tasks = [*TASKS]
    done = lm_eval.simple_evaluate(
        model=backend,
        model_args=arguments,
        tasks=tasks,
        task_manager=manager,
        batch_size=BATCH,
        bootstrap_iters=0,
    )
    ordered = {
        name: sorted(done["samples"][name], key=lambda sample: sample["doc_id"]) for name in TASKS
    }
    return {
        name: [sample["filtered_resps"] for sample in samples] for name, samples in ordered.items()
    }


def largest_difference(ours: Any, theirs: Any) -> float:
    """Between numbers at the same places; anything else must be equal."""
    if isinstance(ours, list | tuple):
        equal(len(ours), len(theirs))
        return max(
            (largest_difference(*pair) for pair in zip(ours, theirs, strict=True)), default=0.0
        )
    if isinstance(ours, float | int) and not isinstance(ours, bool):
        return abs(ours - float(theirs))
    equal(str(ours), str(theirs))
    return 0.0


with feature(f"local-completions, batches of {BATCH}, {len(UNTIL)} `until` strings"):
    arguments = {
        "model": BASE,
        "base_url": f"{V1}/completions",
        "tokenizer": MODEL,
        "tokenized_requests": True,
    }
    served = run(
        "local-completions", **arguments, num_concurrent=2, max_retries=1, add_bos_token=True
    )
    equal(
        {name: len(answers) for name, answers in served.items()},
        dict.fromkeys(TASKS, len(documents)),
    )

with feature("equals its `hf` backend in float32 within 1e-3"):
    local = run("hf", pretrained=MODEL, dtype="float32", device="cpu", add_bos_token=True)
    for name in ("manylora_choice", "manylora_rolling"):
        difference = largest_difference(served[name], local[name])
        equal((name, difference if difference > TOLERANCE else 0), (name, 0))
    equal(served["manylora_until"], local["manylora_until"])
