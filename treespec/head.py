"""A feature head: one transformer layer that guesses the target's next hidden state from its last one.

EAGLE (Li et al. 2024) drafts on the target's own features: the last hidden state and the embedding of the token that
followed go into one decoder layer, whose output stands for the next hidden state and is read by the target's own
output matrix. As in EAGLE-3 and HASS the head is trained on its own outputs for several steps, because below the first
level of a tree that is what it sees. The output matrix is cut to a draft vocabulary, the tokens that the target says
most; a map gives their ids.

Hidden states are handled in units of their own spread: a target's few outlier dimensions would drown the others.

The shipped files hold only the layer, the spread and the map: embedding and output matrix are rows of the target's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from treespec.errors import InputError, TreespecError, VocabularyError
from treespec.files import check_regular, read_json, write_json, write_whole
from treespec.model import input_device

MODEL_TYPE = "treespec_head"
ROPE_BASE = 10000.0
EPS = 1e-5  # of the norms


@dataclass(frozen=True)
class HeadConfig:
    """Shapes of a head; all but ``intermediate_size`` and ``draft_vocabulary`` are the target's.

    Attributes:
        target: whose head this is (a note for people; sizes are what is checked).
        hidden_size: H.
        intermediate_size: of the gated MLP.
        heads: attention heads.
        kv_heads: key and value heads.
        head_dim: D.
        vocabulary: tokens of the target.
        draft_vocabulary: tokens that the head can propose.
    """

    target: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int

    def __post_init__(self) -> None:
        sizes = {name: size for name, size in vars(self).items() if name != "target"}
        wrong = next((name for name, size in sizes.items() if not _is_size(size)), None)
        if wrong is not None:
            raise InputError(f"{wrong} of a feature head must be a whole number from 1; got {sizes[wrong]!r}")
        if self.heads % self.kv_heads or self.head_dim % 2 or self.draft_vocabulary > self.vocabulary:
            raise InputError(
                "a feature head needs heads that its kv_heads divide, an even head_dim, and no more tokens to propose "
                f"than there are; got {sizes}"
            )

    @classmethod
    def read(cls, folder: str | Path) -> HeadConfig:
        """The shapes of the head in a folder.

        Raises:
            InputError: if there is none.
        """
        content = read_json(Path(folder) / "config.json")
        names = {f.name for f in fields(cls)}
        if content.pop("model_type", None) != MODEL_TYPE or content.keys() != names:
            raise InputError(
                f"{folder} holds no readable feature head: its config.json must have {', '.join(sorted(names))}"
            )
        return cls(**{**content, "target": str(content["target"])})

    @classmethod
    def like(cls, target: Any, name: str, draft_vocabulary: int) -> HeadConfig:
        """The shapes of one of the target's own layers."""
        config = target.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        return cls(
            target=name,
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=int(config.vocab_size),
            draft_vocabulary=min(draft_vocabulary, int(config.vocab_size)),
        )


class FeatureHead(nn.Module):
    """The layer.

    Args:
        config: its shapes.
        embedding: ``[rows, H]``, the target's input embedding; frozen.
        output: ``[V, H]``, the target's output matrix; frozen.
        token_of: ``[draft vocabulary]`` int64: target ids of the tokens that can be proposed.
        spread: ``[H]`` root mean square of the target's hidden states, per dimension.
    """

    token_of: Tensor
    embedding: Tensor
    output: Tensor
    spread: Tensor

    def __init__(self, config: HeadConfig, embedding: Tensor, output: Tensor, token_of: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.heads * config.head_dim
        self.token_norm, self.feature_norm = _norm(config), _norm(config)
        self.mix = nn.Linear(2 * size, size, bias=False)
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.q = nn.Linear(size, inner, bias=False)
        self.kv = nn.Linear(size, 2 * config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(inner, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self.register_buffer("token_of", token_of.long(), persistent=False)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("spread", spread, persistent=False)
        self.register_buffer("output", output.detach()[token_of] * spread.to(output), persistent=False)

    def normal(self, hidden: Tensor) -> Tensor:
        """The target's hidden states ``[..., H]`` as features: in units of their spread."""
        return hidden / self.spread

    def pair(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Token embedding and feature ``[..., H]``, each normed, side by side ``[..., 2 H]``."""
        token = F.embedding(tokens, self.embedding)
        return torch.cat([_normed(token, self.token_norm), _normed(features, self.feature_norm)], -1)

    def mixed(self, tokens: Tensor, features: Tensor) -> Tensor:
        """The layer's input ``[..., H]``."""
        mixed: Tensor = self.mix(self.pair(tokens, features))
        return mixed

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[..., 1, D]`` of the rotary angles at positions ``[...]``."""
        size = self.config.head_dim
        # float32 whatever the head's dtype: half precision would be a radian off at position 1,000
        even = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
        angles = positions[..., None].float() * ROPE_BASE ** -(even / size)
        angles = torch.cat([angles, angles], -1)[..., None, :]
        return angles.cos().to(self.mix.weight.dtype), angles.sin().to(self.mix.weight.dtype)

    def queries(self, normed: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """``[..., heads, D]``."""
        return _turned(self.q(normed).unflatten(-1, (self.config.heads, -1)), turn)

    def keys_values(self, normed: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Two of ``[..., kv heads, D]``."""
        key, value = self.kv(normed).unflatten(-1, (2 * self.config.kv_heads, -1)).chunk(2, -2)
        return _turned(key, turn), value

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention: ``x`` ``[..., H]`` and the heads' outputs ``[..., heads * D]`` to a feature."""
        x = x + self.out(attended)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        feature: Tensor = x + self.down(F.silu(gate) * up)
        return feature

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Guessed features ``[B, n, H]`` of the next tokens.

        Args:
            tokens: ``[B, n]`` ids.
            features: ``[B, n, H]``: of the tokens before them, :meth:`normal` hidden states or own outputs.
            positions: ``[B, n]``.
            mask: additive ``[B, 1, n, m]`` or None for rows that follow each other.
            cache: one-layer cache; ``cache.layers[0].update(k, v)`` returns all rows.
        """
        x = self.mixed(tokens, features)
        normed, turn = self.norm1(x), self.rotary(positions)
        query = self.queries(normed, turn).transpose(1, 2)
        key, value = (t.transpose(1, 2) for t in self.keys_values(normed, turn))
        key, value = cache.layers[0].update(key, value)
        rows, past = query.shape[2], key.shape[2] - query.shape[2]
        if mask is None and rows > 1 and past:
            mask = torch.ones(rows, key.shape[2], dtype=torch.bool, device=x.device).tril(past)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None and rows > 1,
            enable_gqa=self.config.heads != self.config.kv_heads,
        )  # fmt: skip
        return self.rest(x, attended.transpose(1, 2).flatten(2))

    def logits(self, features: Tensor) -> Tensor:
        """``[..., draft vocabulary]``."""
        return F.linear(features, self.output)

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` (bfloat16) into a folder, each whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        tensors["token_of"], tensors["spread"] = self.token_of.to(torch.int32), self.spread.float()
        about = {"model_type": MODEL_TYPE, **asdict(self.config)}
        write_whole(folder / "model.safetensors", lambda path: save_file(tensors, path))
        write_json(folder / "config.json", about)


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds a feature head."""
    try:
        return bool(read_json(Path(folder) / "config.json").get("model_type") == MODEL_TYPE)
    except InputError:
        return False


def load_head(folder: str | Path, target: Any, device: str | torch.device | None = None) -> FeatureHead:
    """A shipped or trained head, in the target's dtype.

    Args:
        folder: where it is.
        target: whose head it is. Where its layers are divided among processes, all of them must call this.
        device: where it goes; default where the target's token ids go.

    Raises:
        InputError: if the folder holds no head, or a broken one.
        VocabularyError: if it was made for a target of other sizes.
    """
    folder = Path(folder)
    try:
        config = HeadConfig.read(folder)
        check_regular(folder / "model.safetensors")
        tensors = load_file(folder / "model.safetensors")
        token_of, spread = tensors.pop("token_of").long(), tensors.pop("spread")
        check_fits(config, target)
        _check_own(config, token_of, spread)
        embedding, output = map(_whole_weight, (target.get_input_embeddings(), target.get_output_embeddings()))
        place = input_device(target) if device is None else torch.device(device)
        embedding, output = embedding.to(place), output.to(place)
        token_of, spread = token_of.to(place), spread.to(place)
        with torch.device("meta"):  # no memory for sizes that the file does not have
            head = FeatureHead(config, embedding, output, token_of, spread)
        head.load_state_dict(tensors, assign=True)
    except TreespecError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"{folder} holds no readable feature head ({type(error).__name__}: {reason[:200]})") from None
    return head.to(device=place, dtype=embedding.dtype).eval().requires_grad_(False)


def _check_own(config: HeadConfig, token_of: Tensor, spread: Tensor) -> None:
    """Refuse a map or a spread that would be read past its end, or divided by.

    Raises:
        ValueError: for either.
    """
    if (
        token_of.shape != (config.draft_vocabulary,)
        or not 0 <= int(token_of.min()) <= int(token_of.max()) < config.vocabulary
    ):
        raise ValueError("token_of does not hold an id of the target for every token to propose")
    if spread.shape != (config.hidden_size,) or not bool((spread.isfinite() & (spread > 0)).all()):
        raise ValueError("spread must hold a positive number per dimension")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


@torch.no_grad()
def _whole_weight(module: Any) -> Tensor:
    """A module's weight, also where accelerate keeps it elsewhere or processes share it."""
    with align_module_device(module):  # an offloaded weight is there only inside
        weight: Tensor = module.weight.detach()
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        return weight.clone() if has_offloaded_params(module) else weight


def check_fits(config: HeadConfig, target: Any) -> None:
    """Refuse a head for a target of other sizes.

    Raises:
        VocabularyError: naming both.
    """
    text = target.config.get_text_config(decoder=True)
    if (text.vocab_size, text.hidden_size) != (config.vocabulary, config.hidden_size):
        raise VocabularyError(
            f"this head was made for {config.target} ({config.vocabulary:,} tokens, hidden size {config.hidden_size}); "
            f"the target has {text.vocab_size:,} and {text.hidden_size}"
        )


def _norm(config: HeadConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.hidden_size, eps=EPS)


def _normed(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return F.rms_norm(
        x, norm.normalized_shape, norm.weight, norm.eps
    )  # what a call of the module costs shows in drafting


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-second, first], -1) * turn[1]
