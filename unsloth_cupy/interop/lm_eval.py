"""Tasks of the package lm-eval on models of this library.

Importing this module registers the model "unsloth_cupy" with lm-eval:

    import unsloth_cupy.interop.lm_eval
    lm_eval.simple_evaluate("unsloth_cupy", model_args={"pretrained": "folder"}, tasks=["arc_easy"])

Texts become tokens, windows and stop texts as in lm-eval's own class for transformers.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..errors import ConfigError
from ..placement import to_device_of, to_numpy

NEW = 256  # default maximum number of new tokens, as in lm-eval
OWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p"}


@register_model("unsloth_cupy")
class Model(TemplateLM):
    """A model of this library for lm-eval.

    Parameters
    ----------
    pretrained : path or Transformer
        The folder of a model, an adapter or a run, or a GGUF file; or a loaded model.
    device : str
        As in ``models.load``: auto, cpu or the name of a GPU.
    dtype, quantize : str, optional
        As in ``models.load``.
    batch_size : int
        Maximum number of texts in a call of the model.

    Raises
    ------
    ConfigError
        The model has no tokenizer, or an argument is invalid.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        device: str | None = "auto",
        dtype: str | None = None,
        quantize: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        library = importlib.import_module(__name__.partition(".")[0])  # its public names
        self.model = pretrained
        if not hasattr(pretrained, "log_probs"):
            options = {"dtype": dtype, "device": device or "auto"}
            options |= {} if quantize is None else {"quantize": quantize}
            self.model = library.load(pretrained, **options)
        self.engine_of = library.Engine
        if self.model.tokenizer is None:
            raise ConfigError(f"lm_eval: {pretrained} has no tokenizer; pass a folder with one")
        self.words, self.home = self.model.tokenizer, str(getattr(self.model, "folder", None))
        count = str(batch_size).removeprefix("auto") or "8"
        if not count.isdigit() or int(count) < 1:
            raise ConfigError(f"lm_eval: batch_size={batch_size!r} must be an integer, 1 or more")
        self.batch_size, self.max_length = int(count), self.model.config.positions

    @property
    def tokenizer_name(self) -> str:
        """The folder of the model, by which lm-eval names cached answers."""
        return self.home

    def _special(self, name: str) -> int | None:
        """Return the token that the tokenizer's files name, such as bos_token; None without it."""
        text = self.words.template.tokens.get(name)
        token: int | None = None if text is None else self.words.backend.token_to_id(text)
        return token

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        own = self._special("eos_token")
        ends = self.model.config.end_tokens
        if own is None and not ends:
            raise ConfigError("lm_eval: neither tokenizer nor config.json names an end token")
        return int(ends[0] if own is None else own)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: the first token of texts, or the end token."""
        own = self._special("bos_token")
        return self.eot_token_id if own is None else own

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text; special tokens are added unless it begins with the first."""
        if add_special_tokens is None:
            first = self.words.template.tokens.get("bos_token")
            add_special_tokens = not (first and string.startswith(first))
        tokens: list[int] = self.words.encode(string, special_tokens=add_special_tokens).tolist()
        return tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = [
            (context + continuation)[-(self.max_length + 1) :]
            for _, context, continuation in requests
        ]
        longest = max((len(continuation) for *_, continuation in requests), default=0)
        if longest > self.max_length:
            problem = f"a continuation has {longest} tokens, the model {self.max_length} positions"
            raise ConfigError(f"lm_eval: loglikelihood: {problem}; use a rolling task")
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))  # little padding
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            shape = len(places), max(len(rows[place]) for place in places)
            tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
            labels = np.full(shape, -100)
            for row, place in enumerate(places):
                own = rows[place]
                count = min(len(requests[place][2]), len(own) - 1)
                tokens[row, : len(own)], mask[row, : len(own)] = own, True
                labels[row, len(own) - count : len(own)] = own[len(own) - count :]
            arrays = [to_device_of(each, self.model.table) for each in (tokens, labels, mask)]
            fields = self.model.log_probs(arrays[0], arrays[1], mask=arrays[2])
            log_probs, top1 = to_numpy(fields.log_probs), to_numpy(fields.top1)
            scored = np.roll(labels, -1, axis=1) != -100
            scored[:, -1] = False
            for row, place in enumerate(places):
                own = scored[row]
                total = float(log_probs[row][own].sum(dtype=np.float64))
                results[place] = total, bool(top1[row][own].all())
        return results

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the model's positions."""
        windows, owners = list[Any](), list[int]()
        for number, request in enumerate(requests):
            every = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(each)) for each in every]
            windows += own
            owners += [number] * len(own)
        results = [0.0] * len(requests)
        for number, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            results[number] += total
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each text up to a stop text; all share one engine."""
        prompts, options = list[list[int]](), list[dict[str, Any]]()
        end = self.words.decode([self.eot_token_id], special_tokens=True)
        for request in requests:
            text, request_options = request.args
            own = normalize_gen_kwargs({**request_options}, NEW)
            if others := own.keys() - OWN:
                problem = f"the task sets {', '.join(sorted(others))}, which have no meaning here"
                raise ConfigError(f"lm_eval: generate_until: {problem}; leave them out")
            new = own["max_gen_toks"]
            if new >= self.max_length:
                problem = f"{new} new tokens exceed the model's {self.max_length} positions"
                raise ConfigError(f"lm_eval: generate_until: {problem}; set max_gen_toks")
            known = self.tok_encode(text) or [self.prefix_token_id]
            prompts.append(known[-(self.max_length - new) :])
            options.append({"max_new_tokens": new, **_sampling(own)})
            stops = handle_stop_sequences(own["until"], eos=end)
            options[-1]["stop_texts"] = [stop for stop in stops if stop]
        if not prompts:
            return []
        longest = max(len(p) + o["max_new_tokens"] for p, o in zip(prompts, options, strict=True))
        pages = self.batch_size * -(-longest // 16)
        with self.engine_of(self.model, rows=self.batch_size, pages=pages, page=16) as engine:
            asked = [
                engine.submit(prompt, **own) for prompt, own in zip(prompts, options, strict=True)
            ]
            engine.run()
        results = []
        for request, own in zip(asked, options, strict=True):
            text = self.words.decode(request.samples[0].tokens)
            for stop in own["stop_texts"]:
                text = text.partition(stop)[0]
            results.append(text)
        return results

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as text, by the model's chat template."""
        if add_generation_prompt:
            text: str = self.words.template.question(chat_history, today=False)
            return text
        return str(self.words.template.text(chat_history))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template."""
        return str(self.words.template.source) if chat_template else None


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of sampling; greedy decoding has none."""
    if not options.get("do_sample"):
        return {}
    names = ("temperature", "top_k", "top_p", "min_p")
    return {"seed": 0, **{name: options[name] for name in names if options.get(name) is not None}}
