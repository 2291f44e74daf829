"""Random drafts whose every distribution is known, trees grown from them, frontiers by hand, and traces to test on."""

import dataclasses
import functools
import math

import numpy as np
import torch

from treespec.drafters.growth import grow
from treespec.pairs import load_pair
from treespec.policies import Frontier
from treespec.proposals import propose
from treespec.trace import Caps, PromptInfo, Sampling, Trace, record
from treespec.trace.record import _rows
from treespec.trace.supertree import Supertree


class Draft:
    """A random draft: its distribution after a path depends on the path alone. Ties are common by construction."""

    def __init__(self, seed, vocabulary=7, sharpness=2.0, step=0.5):
        self.seed, self.vocabulary, self.sharpness, self.step = seed, vocabulary, sharpness, step
        self.asked = []
        self._known = {}

    def logits(self, path):
        if tuple(path) not in self._known:
            self._known[tuple(path)] = self._fresh(path)
        return self._known[tuple(path)]

    def _fresh(self, path):
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**31)
        flat = torch.rand(1, generator=generator)  # some nodes sure, some lost
        x = self.sharpness * 2 * flat * torch.randn(self.vocabulary, generator=generator)
        return (x / self.step).round() * self.step

    def expand(self, growth, nodes):
        self.asked.append(len(nodes))
        rows = torch.stack([self.logits(growth.path_tokens(i)) for i in nodes])
        return propose(rows, self.width)

    def children(self, path, k):
        """``[(token, log-probability)]`` of the first k children, in float32 as the engine has them."""
        got = propose(self.logits(path)[None], k)
        return list(zip(got.token[0].tolist(), got.logp[0].numpy()))


class Spy:
    """A policy that remembers what it was shown."""

    def __init__(self, policy):
        self.policy, self.seen = policy, []

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def decide(self, frontier):
        self.seen.append(frontier)
        return self.policy.decide(frontier)


def frontiers(policy, draft):
    """Every frontier of one growing tree."""
    spy = Spy(policy)
    grown(spy, draft)
    return spy.seen


def stacked(level):
    """Frontiers of one depth as a batch, padded with nodes that look alive but are not."""

    def pad(name, value):
        rows = [getattr(f, name)[0] for f in level]
        most = max(len(r) for r in rows)
        filled = [torch.cat([r, r.new_full((most - len(r), *r.shape[1:]), value)]) for r in rows]
        return torch.stack(filled)

    fill = dict(log_path=0.0, entropy=0.1, child_logp=-0.1, alive=False, score=0.0, pool=-torch.inf, ranks=0, drawn=0)
    return Frontier(depth=level[0].depth, **{name: pad(name, value) for name, value in fill.items()})


def best(scored, n):
    """The n largest of ``[(path, score)]`` in their old order; of equals the first."""
    chosen = sorted(range(len(scored)), key=lambda i: -scored[i][1])[:n]
    return [scored[i] for i in sorted(chosen)]


def below(draft, level, k):
    """All children of a level's ``[(path, score)]``, scored by path probability in float32."""
    return [((*path, t), np.float32(score + logp)) for path, score in level for t, logp in draft.children(path, k)]


def grown(policy, draft, max_depth=99):
    draft.width = policy.width
    tree, _ = grow(policy, 0, max_depth, draft.expand)
    return tree


def kept_paths(tree):
    kept, _ = tree.kept()
    return {tuple(kept.token[kept.path(i)[1:]].tolist()) for i in range(1, len(kept))}


def frontier(depth, entropy, child_logp, pool=((),)):
    """The frontier of one node that is certain to be reached, and always the first child on its way."""
    return Frontier(
        depth=depth,
        log_path=torch.zeros(1, 1),
        entropy=entropy,
        child_logp=child_logp,
        alive=torch.ones(1, 1, dtype=torch.bool),
        score=torch.zeros(1, 1),
        pool=torch.tensor(pool),
        ranks=torch.zeros(1, 1, depth, dtype=torch.long),
        drawn=torch.ones(1, depth + 1, dtype=torch.long),
    )


def reference(draft, decide, budget=None, most=20):
    """All paths that ``decide(depth, entropy, P_child, rank)`` lets live, then the most probable ``budget`` of them."""
    alive, level = {}, {(): 0.0}
    for depth in range(most):
        below = {}
        for path, log_path in level.items():
            logp = draft.logits(path).log_softmax(-1)
            bits = float(-(logp.exp() * logp).sum() / math.log(2))
            order = propose(draft.logits(path)[None], draft.width).token[0].tolist()
            for rank, token in enumerate(order):
                if decide(depth, bits, log_path + float(logp[token]), rank):
                    below[(*path, token)] = log_path + float(logp[token])
        alive, level = {**alive, **below}, below
    if budget is not None and len(alive) > budget:
        ranked = sorted(alive.values(), reverse=True)
        if ranked[budget - 1] - ranked[budget] < 1e-5:
            return None  # a tie at the edge: which of the equals stays is checked elsewhere
        alive = {path: p for path, p in alive.items() if p >= ranked[budget - 1] - 1e-9}
    return set(alive)


class Along(Draft):
    """A random draft that has read ``before``: its distribution depends on the last two tokens alone."""

    def __init__(self, seed, before, vocabulary=4):
        super().__init__(seed, vocabulary)
        self.before = tuple(before)

    def logits(self, path):
        return super().logits((*self.before, *path)[-2:])


@functools.cache
def written(seed, length, vocabulary=4):
    """A text that the draft of this seed often guesses: its first choice at three places of four, else its second."""
    text = [seed % vocabulary]
    for i in range(length - 1):
        order = Along(seed, text, vocabulary).children((), 2)
        text.append(order[(i + seed) % 4 == 3][0])
    return tuple(text)


@functools.cache
def by_hand(seeds, caps, length=6, vocabulary=4, sample="greedy", complete=False):
    """A trace without a model, a file or a second: one text per seed, and the draft of that seed behind every token."""
    groups, prompts, left = [], [], []
    for number, seed in enumerate(seeds):
        text = written(seed, length, vocabulary)
        for i in range(length - 1):
            draft = Along(seed, text[: i + 1], vocabulary)
            policy = Supertree(caps, tuple(text[i + 1 : i + 1 + caps.depth]))
            draft.width, room = policy.width, length - 1 - i
            tree, _ = grow(policy, text[i], min(room, caps.depth), draft.expand)
            groups.append(_rows(tree, policy.offered, 20 + i, room, list(text[i + 1 :])))
            left.append(length - 1 - i)
        prompts.append(PromptInfo(number, f"p{number}", "x", 20, length, text[-1]))
    nodes = {name: np.concatenate([g[name] for g in groups]) for name in groups[0]}
    about = {
        "caps": dataclasses.asdict(caps),
        "sample": sample,
        "complete": complete,
        "target": "none",
        "draft": "random",
    }
    prompt = np.repeat(np.arange(len(seeds), dtype=np.int32), length - 1)
    return Trace(about, prompts, nodes, np.flatnonzero(nodes["node"] == 0), prompt, np.array(left, np.int32))


def of_the_toy(path, prompts):
    """A recording of the toy pair, written to ``path``, that is wide enough to search in."""
    caps = Caps(floor=1e-3, depth=8, width=12, nodes=128)
    record(load_pair("toy", "model"), prompts, path, sampling=Sampling(max_new_tokens=64), caps=caps)
    return Trace.load(path)
