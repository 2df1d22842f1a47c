"""
The one attention call: causal, behind a shared prefix, and cached with per-row lengths.

Every key column carries its position (`key_positions`); a query at position p sees the columns whose position lies in
[p - window, p]. Padding columns carry FAR, a position after everything. That one rule covers ragged prompts, sliding windows,
decoding and completions behind a prompt that was run once for a whole group.
"""
import torch
import torch.nn.functional as F

FAR = 1 << 30  # position of a padding column: no query reaches it


class KVCache:
    """Keys and values of the tokens run so far, one row per sequence.

    k[i], v[i]: (B, Hkv, T, D) of layer i; key_positions: (B, T) int64; last_embedding: (B, 1, C), what the smear of the next token
    looks back at. Without `capacity` the tensors are kept as they come, with their gradients (training behind a prefix); with it
    they are written into buffers of that many columns (decoding).
    """

    def __init__(self, num_layers: int, capacity: int | None = None):
        self.k: list = [None] * num_layers
        self.v: list = [None] * num_layers
        self.key_positions = None
        self.last_embedding = None
        self.capacity = capacity
        self.length = 0  # columns filled before the current forward

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores the keys and values (B, Hkv, T, D) of new columns; returns those of all columns."""
        if self.capacity is None:
            assert self.length == 0, "a prefix is run in one forward"
            self.k[layer], self.v[layer] = k, v
            return k, v
        end = self.length + k.shape[2]
        if self.k[layer] is None:
            shape = (k.shape[0], k.shape[1], self.capacity, k.shape[3])
            self.k[layer], self.v[layer] = k.new_zeros(shape), v.new_zeros(shape)
        self.k[layer][:, :, self.length:end] = k
        self.v[layer][:, :, self.length:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def append_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Adds the positions (B, T) of new columns; returns those of all columns."""
        old = self.key_positions
        self.key_positions = positions if old is None else torch.cat([old, positions], dim=1)
        return self.key_positions

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the rows (B',) int64, which may repeat: shares prompts out to their samples, drops finished rows."""
        self.k = [k[rows] for k in self.k]
        self.v = [v[rows] for v in self.v]
        self.key_positions = self.key_positions[rows]
        self.last_embedding = self.last_embedding[rows]


def attention_bias(positions: torch.Tensor, key_positions: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query may look and -inf elsewhere. positions (B, Tq), key_positions (B, Tk) -> (B, 1, Tq, Tk)."""
    distance = positions[:, None, :, None] - key_positions[:, None, None, :]  # (B, 1, Tq, Tk)
    allowed = (distance >= 0) & (distance <= window)
    return torch.zeros(distance.shape, dtype=dtype, device=distance.device).masked_fill_(~allowed, float("-inf"))


def attend(q, k, v, bias, prefix_k=None, prefix_v=None):
    """Attention of queries over their own keys and, with a prefix, over the keys that groups of R = B/U rows share.

    q (B, H, T, D); k, v (B, Hkv, Tk, D); prefix_k, prefix_v (U, Hkv, Tp, D), where unit u's rows are u*R .. u*R+R-1;
    bias (B, 1, T, [Tp +] Tk) -> (B, H, T, D). Scores are scaled by 1/sqrt(D).
    """
    if q.device.type == "cuda":
        if prefix_k is not None:
            R = q.shape[0] // prefix_k.shape[0]
            k = torch.cat([prefix_k.repeat_interleave(R, dim=0), k], dim=2)
            v = torch.cat([prefix_v.repeat_interleave(R, dim=0), v], dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), enable_gqa=q.shape[1] != k.shape[1])
    # On CPU plain matmuls beat scaled_dot_product_attention, most of all in the backward pass.
    B, H, T, D = q.shape
    Hkv, Tk = k.shape[1], k.shape[2]
    group = H // Hkv  # query heads per key/value head
    q = q * D ** -0.5
    scores = _scores(q, k, B, Hkv, group)  # (B, H, T, Tk)
    if prefix_k is None:
        return _mix(torch.softmax(scores + bias, dim=-1), v, B, Hkv, group)
    U = prefix_k.shape[0]
    shared = _scores(q, prefix_k, U, Hkv, group)  # (B, H, T, Tp)
    probs = torch.softmax(torch.cat([shared, scores], dim=-1) + bias, dim=-1)
    shared_probs, own_probs = probs.split([prefix_k.shape[2], Tk], dim=-1)
    return _mix(shared_probs, prefix_v, U, Hkv, group) + _mix(own_probs, v, B, Hkv, group)


def _scores(q, k, U, Hkv, group):
    """q (U*R, Hkv*group, T, D) x k (U, Hkv, Tk, D) -> (U*R, Hkv*group, T, Tk), one matmul per unit and key head."""
    B, H, T, D = q.shape
    if U == B:
        return (q.reshape(B, Hkv, group * T, D) @ k.transpose(-1, -2)).view(B, H, T, -1)
    R = B // U
    q = q.reshape(U, R, Hkv, group * T, D).transpose(1, 2).reshape(U, Hkv, R * group * T, D)
    scores = q @ k.transpose(-1, -2)  # (U, Hkv, R*group*T, Tk)
    return scores.view(U, Hkv, R, group * T, -1).transpose(1, 2).reshape(B, H, T, -1)


def _mix(probs, v, U, Hkv, group):
    """probs (U*R, Hkv*group, T, Tk) x v (U, Hkv, Tk, D) -> (U*R, Hkv*group, T, D)."""
    B, H, T, Tk = probs.shape
    if U == B:
        return (probs.reshape(B, Hkv, group * T, Tk) @ v).view(B, H, T, -1)
    R = B // U
    probs = probs.reshape(U, R, Hkv, group * T, Tk).transpose(1, 2).reshape(U, Hkv, R * group * T, Tk)
    mixed = probs @ v  # (U, Hkv, R*group*T, D)
    return mixed.view(U, Hkv, R, group * T, -1).transpose(1, 2).reshape(B, H, T, -1)
