"""Bad inputs, one a line, grouped by where they are given: `input -> what the message must quote` (without an arrow:
the last value)."""

from __future__ import annotations

NUMBERS = {  # option: values that none of the commands may take
    "--epochs": "0 -1 many 1.5 nan 1e3 1000000000000",
    "--seed": "x -1 1.5 99999999999999999999999999",
    "--batch-size": "0 -8 30 eight 1000000000000",
    "--micro-batches": "0 -1 3 x 1000000000000",
    "--max-length": "0 -1 x 1000000000000",
    "--train-samples": "0 -1 x 1.5 1000000000000",
}
TRAINING = {
    "--learning-rate": "0 -1 nan inf x 1e300",
    "--validation-samples": "0 -1 x 1000000000000",
    "--test-samples": "0 -1 x 1000000000000",
}

COMMANDS = """
simulat -> Did you mean 'simulate'?
dotcor -> Did you mean 'doctor'?
runn -> Did you mean 'run', 'runs'?
--no-such-option
--verison
run extra -> extra
run --mode emulate
run --fidelity exact
run --workdirr x -> --workdir
run --report -> --report
run --report {folder}
run --report {file}/report.json
run --report /proc/report.json
run --workdir {file}
run --workdir {file}/run
run --workdir /proc/run
run --resume --workdir {folder}/mistyped
run --resume --workdir {empty}
run --resume --epochs 7 -> no such folder
run --method pac-plus -> Did you mean 'pac_plus'?
run --method ''
run --model tiny-bort
run --model ''
run --model 'quite unknown'
run --model {file}
run --model {empty}
run --model {folder}/none
run --model tiny-bert --task sentimnt
run --model tiny-bert --task ''
run --model tiny-bert --data {file} -> file.csv
simulate --model tiny-bert --data {empty} -> empty
run --model tiny-bert --data {folder}/none -> none
run --model tiny-bert --task digits --data {empty}
run --model tiny-bert --task sst2 --data {file} -> file.csv
simulate --model tiny-bert --task sst2 --data {empty} -> empty
simulate --model tiny-bert --task mrpc --data {data} -> data
simulate --cluster laptob -> Did you mean 'laptop'?
simulate --cluster ''
simulate --cluster {long} -> aaaa
simulate --cluster {long}.toml -> aaaa
simulate --cluster {folder}
simulate --cluster {folder}/none.toml
simulate --cluster {loop}
simulate --cluster {fifo}
simulate --cluster /dev/zero
simulate --cluster /dev/null
simulate --cluster {binary}
simulate --cluster {file}
simulate --report {folder}
simulate --fidelity paced -> --fidelity
simulate --resume -> --resume
plan --report x -> --report
plan --epochs 2 -> --epochs
devices --layers --batch x
devices --layers --batch 0
devices --layers --length 0
devices --layers --length x
devices --layers --model tiny-bert --length 100000 -> 100000
devices --layers --model tiny-bert --device nobody
devices --layers --links -> Several
devices --cluster nowhere
devices --cluster {binary}
devices --fidelity best
draw -> report
draw {folder}/none.json
draw {data} -> no run
draw {empty}
draw {binary}
draw {file}
draw /dev/zero
draw {fifo}
draw {loop}
draw {report} --png maybe
draw {report} --out {file}
draw {report} --out {file}/below
draw {report} --out /proc/figures
draw {report} {report} -> report.json
bench nothing
bench all --only minilm -> --only
bench runtime --only minilm -> --only
fetch no-such-asset
fetch all-MiniLM-L6
reproduce nobody
reproduce pac_plus table99
reproduce pac_plus table5 --seeds 0
reproduce pac_plus table5 --seeds 101
reproduce pac_plus table5 --seeds x
reproduce pac_plus table5 --all -> --all
reproduce pac_plus table5 --out {file}
reproduce pac_plus table5 --data {folder}/none
reproduce pac_plus table5 --kept {file}
reproduce pac_plus table5 --out /proc/x
reproduce pac_plus table5 --kept /proc/x
reproduce pac_plus --png maybe
predict -> result
predict {folder} -> sentences 0
predict {folder} text -> result.json
predict {file} text -> file.csv
predict {folder}/none text -> none
predict {folder} text --file {file} -> sentences 1
predict {folder} --file {file} --pair x -> second texts 1
evaluate -> model
evaluate tiny-bert
evaluate {folder}/none
evaluate {file}
evaluate tiny-gpt2 --task no-task
evaluate tiny-gpt2 --split training
evaluate tiny-gpt2 --calibration best
evaluate tiny-gpt2 --samples 0
evaluate tiny-gpt2 --samples x
evaluate tiny-gpt2 --max-length 0
evaluate tiny-gpt2 --task sst2 --data {file} -> file.csv
serve --requests 0
serve --requests -1
serve --requests x
serve --requests 1000000000000
serve --rate -1
serve --rate nan
serve --rate inf
serve --rate x
serve --length -1
serve --http --requests 5 -> --requests
serve --http --host 256.0.0.1
serve --port 9000 -> --port
serve --http --port 99999
chat tiny-gpt2 hello --top-p 2
generate tiny-gpt2 hello --max-tokens 0
export out --merge --rank 4 -> --rank
serve --length x
serve --model tiny-bert --mode simulate --length 100000
serve --mode simulate --length 513
serve --length 100000
serve --seed x
serve --seed -1
serve --reaction panic
serve --option slow_factor=1
serve --option slow_factor=nan
serve --option slow_factor=x
serve --option window=0
serve --option window=x
serve --option windows=3 -> windows
serve --option repeats=0
serve --option repeats=6
serve --option report_every_s=0
serve --option report_every_s=nan
serve --option report_every_s=-1
serve --option report_every_s=x
serve --option probe_every_s=0
serve --option probe_every_s=nan
serve --option probe_every_s=inf
serve --mode emulate
serve --fidelity exact
serve --report {folder}
serve --out {file} -> file.csv
serve --out /proc/x
bench serving --soak -1
bench serving --soak x
bench serving --soak 1000000000000
serve --cluster nowhere
serve --cluster {binary}
serve --model tiny-bort
"""

OPTIONS = {
    "confidant": """
partition=best
drain_every=-1
schedule=gpipe -> gpipe
paradigm=standalone -> standalone
technique=prompt
split=heads -> heads
split=columns
heads=best
""",
    "ringada": """
unfreeze_evry=4 -> Did you mean 'unfreeze_every'?
unfreeze_every=0
unfreeze_every=often
local_iterations=0
in_flight=0
bottleneck=0
bottleneck=100000
depth=0
depth=7
patience=0
threshold=1 -> 1
threshold=-0.1
unfreezing=never
data=alphabet
data=dirichlet -> concentration
data=dirichlet:0 -> 0
data=sizes:1
data=sizes:1,x
""",
    "pac_plus": """
reduction -> not KEY=VALUE
=4
reducton=4 -> Did you mean 'reduction'?
reduction=four
reduction=0
reduction=-1
reduction=1000000000000
reduction=[1
reduction={brackets} -> reduction
reduction=5 -> 5
target=both
dropout=1
dropout=-0.1
dropout=nan -> dropout
dropout=x
initialization=random
backbone_dtype=int3
compute_dtype=float64
cache_dtype=float8
reduction=1000000000
order=best
objective=fastest
paradigm=best
""",
    "fine_tuning": """
technique=prefix
paradigm=best
lora_rank=0
lora_rank=-1
lora_rank=x
lora_rank=1000000000
lora_rank=60000 -> 60,000
lora_dropout=1
lora_dropout=-1
bottleneck=0
bottleneck=1000000000000
bottleneck=65000 -> 65,000
dropout=2
rank=4 -> lora_rank
""",
    "galaxy_plus": """
system=petals
planner=best
overlap=maybe
both_ways=maybe
tile_tokens=-1
tile_tokens=x
scheme=3
scheme=x
generate=-1
generate=x
generate=4 -> generate
compare=-1
tile_tokens=1000000000000
system=local scheme=1 -> local
""",
    "p_rge": """
queries=0
queries=-1
queries=x
queries=1000000000000
epsilon=0
epsilon=-1
epsilon=nan -> epsilon
steps=0
steps=-1
steps=1000000000
execution=best
loss=hinge
words=bad
technique=prefix
rank=0
rank=1000000000
rank=60000 -> 60,000
alpha=nan -> alpha
precision=int3
compute_dtype=float64
after_loss=cry
adapt=maybe
""",
}

STEP_FAULTS = """
explode
kill:nobody@step3 -> nobody
kill:alpha@step0 -> step = 0
kill:alpha@x -> x
kill:alpha@soon -> names no step
slow:alpha:0.5@step3 -> 0.5
slow:alpha:nan@step3 -> nan
memory:alpha:1@step3 -> above 1
memory:alpha>beta:2@step3 -> devices of
kill:alpha:4@step3 -> factor
return:alpha@step3 -> not gone
kill:alpha@step1000000 -> steps
"""

FAULTS = """
slow
slow:1
slow@1-2
explode:1@1-2
slow:nobody:4@1-2
slow:9:4@1-2
slow:-1:4@1-2
slow:²:4@1-2
slow:alpha:4@x-2
slow:alpha:4@1-x
slow:alpha:4@2-1
slow:alpha:4@1-1
slow:alpha:4@-1-2
slow:alpha:4@nan-2
slow:alpha:4@1-nan
slow:alpha:4@inf
slow:alpha:4@step3
slow:alpha:x@1-2
slow:alpha:0@1-2
slow:alpha:1@1-2
slow:alpha:0.5@1-2
slow:alpha:-4@1-2
slow:alpha:nan@1-2
slow:alpha:inf@1-2
slow:alpha:4:5@1-2
memory:alpha:4@1-2
kill:alpha:4@1-2
freeze:alpha:4@1-2
kill:alpha@1e300
return:alpha@1
'slow:al pha:4@1-2'
:::
"""

CLUSTERS = {  # what is replaced in a sound file: what takes its place
    'name = "two"': """
name = two -> line 1
name = 5 -> 5
name = "" -> name
name = "a\\u001b[31mb" -> name
name = ["two"] -> name
nam = "two" -> Did you mean 'name'?
link = 5 -> link
device = 5 -> line 5
""",
    "memory_mb = 600": """
memory_mb = 0 -> 0
memory_mb = -1 -> -1
memory_mb = nan -> nan
memory_mb = inf -> inf
memory_mb = 1e300 -> 1e+300
memory_mb = {digits} -> memory_mb
memory_mb = "600" -> 600
memory_mb = true -> True
memory_mb = [600] -> 600
memory_mb = {{a = 600}} -> 600
memmory_mb = 600 -> Did you mean 'memory_mb'?
memory_mb = 600\\nmemory_mb = 700 -> line 5
memory_mb = 600\\nlatency_ms = 1e300 -> 1e+300
memory_mb = 600\\nlatency_ms = -1 -> -1
memory_mb = 600\\nlatency_ms = nan -> nan
memory_mb = 600\\nbandwidth_mbit_per_s = 0 -> 0
memory_mb = 600\\nbandwidth_mbit_per_s = 1e300 -> 1e+300
memory_mb = 600\\nwatts_busy = -5 -> -5
memory_mb = 600\\nwatts_idle = nan -> nan
memory_mb = 600\\nstorage_mb_per_s = 0 -> 0
memory_mb = 600\\nprocessor = "quantum" -> processor
memory_mb = 600\\nmodel = "no-such-board" -> no-such-board
memory_mb = 600\\nmodel = 5 -> 5
memory_mb -> malformed
""",
    "gflops = 30": """
gflops = 0 -> 0
gflops = -1 -> -1
gflops = nan -> nan
gflops = inf -> inf
gflops = 1e300 -> 1e+300
gflops = {digits} -> gflops
gflops = "fast" -> fast
gflops = 30 MHz -> malformed
 -> gflops
""",
    "host_share = 0.5": """
host_share = 0 -> 0
host_share = -0.5 -> -0.5
host_share = 1.5 -> 1.5
host_share = 100 -> 100
host_share = nan -> nan
host_share = "half" -> half
host_share = 0.5\\naddress = "" -> address
host_share = 0.5\\naddress = 5 -> 5
host_share = 0.5\\ncolour = "red" -> colour
""",
    'name = "alpha"': """
name = "beta" -> beta
name = "" -> name
name = 5 -> 5
name = "a\\u0007b" -> name
name = "{long}" -> aaaa
title = "alpha" -> title
""",
    "[[device]]": """
[device] -> line 8
[[devices]] -> devices
[[device -> malformed
""",
    "[defaults]": """
[default] -> default
[[defaults]] -> defaults
""",
    "host_share = 0.4": """
host_share = 0.4\\n[[link]] -> from
host_share = 0.4\\n[[link]]\\nfrom = "alpha" -> to
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "nobody"\\nbandwidth_mbit_per_s = 1 -> nobody
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "alpha"\\nbandwidth_mbit_per_s = 1 -> alpha
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta" -> bandwidth_mbit_per_s
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta"\\nbandwidth_mbit_per_s = 0 -> 0
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta"\\nbandwidth_mbit_per_s = 1e300 -> 1e+300
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta"\\nbandwidth_mbit_per_s = 1\\nboth_ways = "no" -> no
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta"\\nbandwidth_mbit_per_s = 1\\nlatency_ms = -1 -> -1
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta"\\nbandwidth_mbit_per_s = 1\\nspeed = 1 -> speed
host_share = 0.4\\n[[link]]\\nfrom = "alpha"\\nto = "beta"\\nbandwidth_mbit_per_s = 1\\n{again} -> alpha
""",
}

JOBS = """
{{ -> job.json
[] -> job.json
5 -> job.json
null -> job.json
{nested} -> array
{{"epochs": 0}} -> epochs
{{"epochs": 1000000000000}} -> epochs
{{"epochs": "three"}} -> three
{{"epochs": 1.5}} -> 1.5
{{"epochs": null}} -> epochs
{{"seed": 1e400}} -> job.json
{{"batch_size": 0}} -> batch_size
{{"batch_size": 30}} -> 30
{{"batch_size": 1000000000000}} -> batch_size
{{"micro_batches": -1}} -> -1
{{"learning_rate": 0}} -> learning_rate
{{"learning_rate": -1}} -> -1
{{"weight_decay": -1}} -> -1
{{"weight_decay": 1e300}} -> 1e+300
{{"warmup_fraction": 1}} -> warmup_fraction
{{"warmup_fraction": -0.5}} -> -0.5
{{"max_length": 0}} -> max_length
{{"train_samples": 0}} -> train_samples
{{"test_samples": -4}} -> -4
{{"method": 5}} -> 5
{{"model": []}} -> model
{{"data": 5}} -> 5
{{"options": []}} -> options
{{"options": "none"}} -> none
"""

REPORTS = """
mode = "neither" -> neither
source = "guessed" -> guessed
job = null -> job
job.epochs = 0 -> epochs
job.epochs = "three" -> three
cluster.devices = [] -> devices
cluster.devices.0.name = 5 -> 5
cluster.devices.0.memory_bytes = -1 -> memory_bytes
cluster.devices.0.flops_per_s = "fast" -> fast
plan = 5 -> plan
plan.stages = 5 -> stages
plan.stages = [] -> without stages
steps = 5 -> steps
steps.0.loss = "low" -> low
steps.0.epoch = "first" -> first
epochs = null -> epochs
epochs.0.seconds = "long" -> long
timelines = [] -> timelines
phases_s = 5 -> phases_s
bytes = 5 -> bytes
metrics = 5 -> metrics
valid = "yes" -> yes
notes = 5 -> notes
overrun_share = "none" -> none
"""
