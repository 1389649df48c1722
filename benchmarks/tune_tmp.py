import itertools, sys

sys.path.insert(0, "benchmarks")
import torch, triton, qmargin
from head_stages import median_ms, make_batch
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.sparse import SparseStep
from qmargin.kernels.triton import rescore as RS, bound as BD, gradients as GR
from qmargin.kernels.head_reference import GROUP

torch.manual_seed(0)
k, d, B = 2_059_906, 512, 1024
head = MarginClassifier(
    d, k, qmargin.q_margin(scale=35.0), device="cuda", gradient="fused", screen_dtype=torch.float16
)
e, y = make_batch(head, B)
head.refresh()
K = head.kernels
u = torch.nn.functional.normalize(e)
W = head.prototypes.detach()
inv = head.inverse_norms
prep = K.prepare_rows(u, y, W, inv, torch.float16)
step = SparseStep(head, prep, y)
term = head.loss.margin(prep.target_cosines.double(), 35.0, labels=y)
maxima = K.group_maxima(prep.rounded, head.copy, y, k)
slack = step.slack()
pairs = K.list_pairs(maxima, term.logits, term.log_reference, slack, scale=35.0, order=0.25)
ng = -(-k // GROUP)
groups = pairs.groups
ordered, order = groups.sort(stable=True)
bounds = torch.arange(ng + 1, dtype=torch.int32, device="cuda")
seg = torch.searchsorted(ordered, bounds, out_int32=True)
order32 = order.to(torch.int32)
print(
    "pairs/row",
    len(groups) / B,
    "sort",
    median_ms(lambda: groups.sort(stable=True)),
    "sort unstable",
    median_ms(lambda: groups.sort()),
    "searchsorted",
    median_ms(lambda: torch.searchsorted(ordered, bounds, out_int32=True)),
)
scores = torch.empty((len(groups), GROUP), device="cuda")
for prec, BR, BK, w, st in itertools.product(
    ["tf32x3", "ieee"], [16, 32], [64, 128], [2, 4, 8], [2, 3]
):
    if prec == "ieee" and (w != 4 or st != 3):
        continue
    f = lambda: RS._rescore[(ng,)](
        u,
        W,
        inv,
        y,
        pairs.rows,
        order32,
        seg,
        scores,
        k,
        d,
        GROUP,
        BR,
        BK,
        prec,
        num_warps=w,
        num_stages=st,
    )
    try:
        print("rescore", prec, BR, BK, w, st, f"{median_ms(f, 5, 2):.3f}", flush=True)
    except Exception as ex:
        print("rescore", prec, BR, BK, w, st, "failed", str(ex)[:80])
floor = torch.empty(B, dtype=torch.float64, device="cuda")
cnt = torch.empty(B, dtype=torch.int32, device="cuda")
for BL, w, c, f_ in [
    (4096, 8, 6, 2),
    (4096, 16, 6, 2),
    (2048, 8, 6, 2),
    (8192, 16, 6, 2),
    (4096, 8, 6, 1),
    (4096, 8, 0, 0),
    (4096, 8, 6, 0),
]:
    f = lambda: BD._bound[(B,)](
        maxima,
        term.logits,
        term.log_reference,
        slack,
        floor,
        cnt,
        ng,
        35.0,
        0.25,
        c,
        f_,
        1e-5,
        BL,
        num_warps=w,
    )
    print("bound", BL, w, c, f_, f"{median_ms(f):.3f}", cnt.float().mean().item())
for BL, w in [(4096, 8), (2048, 8), (1024, 4), (8192, 8), (4096, 16)]:
    f = lambda: BD._list[(B,)](
        maxima, pairs.floor, slack, pairs.starts, pairs.groups, pairs.rows, ng, BL, num_warps=w
    )
    print("list", BL, w, f"{median_ms(f):.3f}")
o = dict(scale=35.0, order=0.25)
sol = K.solve_lists(
    K.rescore(u, W, inv, y, pairs), pairs, term.logits, term.log_reference, **o, capacity=8
)
wt = torch.ones(B, device="cuda")
for sp, bl, w in itertools.product([4, 8, 16], [4, 8, 16], [2, 4, 8]):
    parts = torch.empty((sp, B, d), device="cuda")
    f = lambda: GR._embedding_gradient[(B, sp)](
        sol.columns,
        sol.posterior,
        sol.starts,
        y,
        W,
        inv,
        wt,
        wt,
        parts,
        B,
        d,
        sp,
        512,
        bl,
        num_warps=w,
    )
    print("gx", sp, bl, w, f"{median_ms(f, 5, 2):.3f}", flush=True)
