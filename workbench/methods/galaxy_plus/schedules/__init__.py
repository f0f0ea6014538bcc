"""Single-shot inference on several devices: Galaxy+'s two schemes, its baselines, and one more token with a key-value
cache.

Operations (stage: block number; part: first tile; microbatch: step of the ring) and values (the same indices):

- EMB on the first position reads ids, writes emb of every tile; ENTER reads emb, writes hid and at the tile's owner
  res.
- QKV, CQ, UP read hid tiles and write one value for all of them: qkv, q, act.  CKV reads all mem tiles, writes kv.
- ATT reads all qkv, CATT q and kv; they write ctx of each of their tiles.  OUT, COUT (from ctx), DOWN (from act) write
  a product for
  each of their tiles: prod, or sum of step 0 where the ring's sum begins.  ADD reads prod and the received sum, writes
  the next sum.
- CONN reads its terms and, last, res; it writes hid and res for the next block; mem after an encoder, only hid at the
  end.
- HEAD on the first position reads all hid tiles, writes out.
- 'sequence': QKV writes q and kv, and kv goes around the ring.  'tensor': ALLREDUCE makes sum from prod; BROADCAST
  makes wide from emb.
  'pipeline': between two positions emb is the residual stream, which CONN writes and ENTER normalises.
"""

from workbench.methods.galaxy_plus.schedules.baselines import inference_schedule
from workbench.methods.galaxy_plus.schedules.costs import inference_costs
from workbench.methods.galaxy_plus.schedules.layout import InferenceLayout
