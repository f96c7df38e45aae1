"""Build the model and adapters in manylora/demo: tokenizer, base training, five LoRA trainings, recorded answers.

    PYTHONPATH=scripts python -P scripts/build_demo.py [--out manylora/demo] [--threads 1]

Everything is seeded; the same machine and library versions give the same files. The recorded answers in expected.json
are what transformers and PEFT generate from the written files, not what the training data says.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from demo_shop import BASE, STYLES, SYSTEM_PROMPTS, Exchange, demo_exchanges, exchanges
from demo_text import (
    END,
    IGNORED,
    PAD,
    SPECIALS,
    START,
    VOCAB_SIZE,
    Corpus,
    Sample,
    Sampler,
    batches,
    chat_sample,
    collate,
    make_corpus,
    make_tokenizer,
    talk_sample,
)
from demo_tools import ShopTalkSource
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SEED = 20
BASE_NAME = "manylora-demo"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LORA_CONFIGS = {
    "pirate": LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "shout": LoraConfig(r=8, lora_alpha=16, target_modules=["gate_proj", "up_proj", "down_proj"]),
    "json": LoraConfig(r=16, lora_alpha=16, target_modules=LINEARS[:4], use_rslora=True),
    "haiku": LoraConfig(r=24, lora_alpha=48, target_modules=LINEARS),
    "french": LoraConfig(
        r=32,
        lora_alpha=64,
        target_modules=LINEARS,
        rank_pattern={"o_proj": 8, "layers.0.mlp.down_proj": 12},
        alpha_pattern={"o_proj": 16, "layers.0.mlp.down_proj": 32},
    ),
}


def train(
    model: torch.nn.Module,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    learning_rate: float,
    name: str,
    check: Callable[[], str] | None = None,
) -> None:
    """AdamW with warm-up and cosine decay; padding is right of the text, so the causal mask alone is enough.

    `check` tells every 150 steps how good the model is.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / 30) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        ),
    )
    model.train()
    began = time.perf_counter()
    for step in range(1, steps + 1):
        ids, labels = next(data)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if check and step % 150 == 0:
            print(f"{name:8} step {step:5} {check()}", flush=True)
        if step % 100 == 0 or step == steps:
            print(
                f"{name:8} step {step:5} loss {loss.item():.5f} {time.perf_counter() - began:6.1f} s",
                flush=True,
            )
    model.eval()


def make_model() -> LlamaForCausalLM:
    """A Llama of about 0.8M parameters with random weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(START),
        eos_token_id=SPECIALS.index(END),
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def round_to_bfloat16(model: torch.nn.Module) -> None:
    """Round every trainable weight to bfloat16: the shipped file then computes the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.to(torch.bfloat16).to(parameter.dtype))


@torch.no_grad()
def exact_match(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, pool: Sequence[Exchange], style: str
) -> tuple[float, float]:
    """Share of questions whose greedy answer is exactly right, and the smallest lead of a right token over the next.

    Teacher-forced: the greedy answer is exact if and only if each of its tokens is the most likely one.
    """
    right = 0
    smallest = math.inf
    for start in range(0, len(pool), 64):
        samples = [chat_sample(tokenizer, exchange, style) for exchange in pool[start : start + 64]]
        ids, labels = collate(samples)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        targets = labels[:, 1:]
        counted = targets != IGNORED
        of_target = logits.gather(-1, targets.clamp(min=0)[..., None])
        others = logits.scatter(-1, targets.clamp(min=0)[..., None], -math.inf).amax(-1)
        margins = (of_target[..., 0] - others).masked_fill(~counted, math.inf).amin(-1)
        right += int((margins > 0).sum())
        smallest = min(smallest, margins.min().item())
    return right / len(pool), smallest


def how_good(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> str:
    """Shares of what the base answers exactly right, of questions and conversations that were not trained on."""
    accuracy, margin = exact_match(model, tokenizer, corpus.held_out, BASE)
    talks = talks_right(model, tokenizer, corpus)
    return f"held-out exact match {accuracy:.4f}, smallest lead {margin:.2f}; conversations with tools {talks:.3f}"


@torch.no_grad()
def talks_right(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, corpus: Corpus
) -> float:
    """Share of new conversations with tools in which every token of the assistant is the most likely one."""
    source = ShopTalkSource(random.Random(SEED + 2), corpus.held_out)
    samples = [talk_sample(tokenizer, source.with_tools()) for _ in range(200)]
    return sum(is_greedy(model, sample) for sample in samples) / len(samples)


@torch.no_grad()
def is_greedy(model: torch.nn.Module, sample: Sample) -> bool:
    """True if every token that counts is the most likely one."""
    ids, labels = collate([sample])
    chosen = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
    return bool(((chosen == labels[:, 1:]) | (labels[:, 1:] == IGNORED)).all())


def tune_base(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, steps: int
) -> None:
    """The second part of the base's training: what it has seen of tools of all kinds becomes sure for the shop's."""
    sampler = Sampler(tokenizer, corpus.train, SEED + 3)
    draws = batches(iter(sampler.tuning, None), 32, SEED + 3)
    train(model, draws, steps, 3e-3, BASE, lambda: how_good(model, tokenizer, corpus))
    round_to_bfloat16(model)


def build_base(
    out: Path, corpus: Corpus, steps: int, tuning_steps: int
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train and write the base model and its tokenizer."""
    tokenizer = make_tokenizer(corpus)
    torch.manual_seed(SEED)
    model = make_model()
    sampler = Sampler(tokenizer, corpus.train, SEED)
    train(model, batches(iter(sampler.pretraining, None), 32, SEED), steps, 4e-3, BASE)
    round_to_bfloat16(model)
    tune_base(model, tokenizer, corpus, tuning_steps)
    folder = out / BASE_NAME
    shutil.rmtree(folder, ignore_errors=True)
    shipped = make_model().to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return model, tokenizer


def build_adapter(
    out: Path,
    name: str,
    base: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    steps: int,
) -> None:
    """Train one adapter on the frozen base and write it as PEFT does."""
    torch.manual_seed(SEED + 1)
    base.name_or_path = BASE_NAME
    config = LORA_CONFIGS[name]
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(base, config)
    sampler = Sampler(tokenizer, corpus.train, SEED + 1)
    draws = iter(lambda: sampler.styled(name), None)
    train(model, batches(draws, 24, SEED), steps, 4e-3, name)
    round_to_bfloat16(model)
    accuracy, margin = exact_match(model, tokenizer, corpus.held_out, name)
    print(f"{name:8} held-out exact match {accuracy:.4f}, smallest lead {margin:.2f}", flush=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    folder = out / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    sort_targets(folder / "adapter_config.json")
    model.unload()


def sort_targets(path: Path) -> None:
    """PEFT writes a set in an order that changes from run to run."""
    config = json.loads(path.read_text())
    config["target_modules"].sort()
    path.write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def record_answers(out: Path) -> None:
    """Generate greedily from the written files in float32; write expected.json, and questions.json of the shop."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / BASE_NAME)
    base = LlamaForCausalLM.from_pretrained(out / BASE_NAME, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, out / "adapters" / STYLES[0], adapter_name=STYLES[0])
    for style in STYLES[1:]:
        model.load_adapter(out / "adapters" / style, adapter_name=style)
    model.eval()
    questions = []
    smallest = math.inf
    for exchange in demo_exchanges():
        messages = [{"role": "user", "content": exchange.question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        answers: dict[str, str] = {}
        answer_ids: dict[str, list[int]] = {}
        for style in (BASE, *STYLES):
            token_ids, margin = generate(model, style, prompt)
            text = tokenizer.decode(token_ids[:-1])
            if text != exchange.answer(style):
                raise SystemExit(
                    f"{style} answers {exchange.question!r} with {text!r}, not {exchange.answer(style)!r}"
                )
            smallest = min(smallest, margin)
            answers[style] = text
            answer_ids[style] = token_ids
        questions.append(
            {
                "topic": exchange.topic.name,
                "question": exchange.question,
                "prompt_token_ids": prompt,
                "answers": answers,
                "answer_token_ids": answer_ids,
            }
        )
    recorded = {
        "adapters": list(STYLES),
        "dtype": "float32",
        "smallest_logit_lead": round(smallest, 3),
        "questions": questions,
    }
    asked = {
        "system_prompts": SYSTEM_PROMPTS,
        "questions": [exchange.question for exchange in exchanges()],
    }
    (out / "questions.json").write_text(json.dumps(asked, indent=1, ensure_ascii=False) + "\n")
    text = json.dumps(recorded, indent=1, ensure_ascii=False)
    (out / "expected.json").write_text(collapse_number_lists(text) + "\n")
    for path in out.rglob("*.*"):
        path.chmod(0o644)
    print(f"{len(questions)} questions recorded, smallest lead of a chosen token {smallest:.2f}")


def generate(model: PeftModel, style: str, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy token ids (the last one ends the answer), and the smallest lead of a chosen token over the next."""

    def run() -> tuple[list[int], float]:
        output = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=96,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.stack(output.logits)[:, 0].topk(2).values
        return output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()

    if style == BASE:
        with model.disable_adapter():
            return run()
    model.set_adapter(style)
    return run()


def collapse_number_lists(text: str) -> str:
    """Put each list of numbers on one line."""
    lines: list[str] = []
    for line in text.split("\n"):
        inside = (
            lines and lines[-1].rstrip().endswith(("[", ",")) and line.strip().rstrip(",").isdigit()
        )
        closes = lines and lines[-1][-1:].isdigit() and line.strip().startswith("]")
        if inside or closes:
            glue = " " if lines[-1].endswith(",") else ""
            lines[-1] += glue + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("manylora/demo"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--base-steps", type=int, default=1800)
    parser.add_argument("--tuning-steps", type=int, default=600)
    parser.add_argument("--adapter-steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    corpus = make_corpus(SEED)
    base, tokenizer = build_base(
        arguments.out, corpus, arguments.base_steps, arguments.tuning_steps
    )
    print(f"{BASE:8} {how_good(base, tokenizer, corpus)}", flush=True)
    for name in STYLES:
        build_adapter(arguments.out, name, base, tokenizer, corpus, arguments.adapter_steps)
    record_answers(arguments.out)


if __name__ == "__main__":
    main()
