"""Texts of the planner's and the puzzles' answers in a page, in English; `{}` stands for any words.

`answers.po` has their translations, and `WordTranslation` fills them. An answer that none of them
fits stays English; a test asks for the usual answers and finds English words. The first one that
fits is taken, so a whole line stands before its parts.
"""

GUIDE = "the field's guide ({}) says {}"
PLANS = (
    "{}. {}: {} per step, {}, {}",
    f"{GUIDE}: the same",
    f"{GUIDE}, which is not legal here ({{}})",
    f"{GUIDE}: lacks {{}}, so overruled",
    f"{GUIDE}: {{}}, but its memory is tight, so overruled",
    f"{GUIDE}: {{}}, but estimated {{}} over, so overruled",
    f"{GUIDE}: as fast, {{}}",
    f"{GUIDE}: {{}} slower ({{}}), so overruled",
    "try: {}: {}",
    "{}, micro-batch {}, recompute {}",
    "{}, micro-batch {}",
    "fits",
    "tight",
    "no",
    "below {}: {}",
    "above {}: {}",
    "{} = {}: nothing divides it over {} devices; try: {}",
    '--on "{}": "{}" is no device of the catalogue ({}); try: a file of its figures, as in {}',
)
"""Of `shoal.teach.browser.plan_model`."""
LIMITS = (
    "layout.schedule = {}: needs an even number of ranks and an even number of micro-batches, "
    "at least two per rank, got layout.pp = {} and {}; try: layout.pp={} and {}",
    "layout.schedule = {}: needs micro-batches per step in a multiple of layout.pp = {}, got {}; "
    "try: {}, or layout.schedule={}",
    "layout.schedule = {}: needs at least {} rank, {} micro-batch and {} chunk, got {}",
    "--ranks = {}: {} is shown with {} to {} ranks; try: {}",
    "--ranks = {}: experts are shown on {} to {} ranks; try: {}",
    "tensor parallelism",
    "expert parallelism",
    "ring attention",
)
"""Of drawings that a schedule or a walk refuses."""
PUZZLES = (
    "{}: it has no async def program(m); try: the first example of shoal docs puzzles",
    "puzzle: deadlock: {}",
    "puzzle: ranks meet in different collectives: {} of layer {}, {} of layer {}",
    "puzzle: layer {} ends without its whole weight at step {}",
    "puzzle: rank {} holds no {}",
    "puzzle: rank {} waits for rank {}, its mailbox holds a message of rank {}",
    "puzzle: rank {}: {}",
    "ranks {}: {} {}, from {} to {} steps",
    "rank {}: {} {}, from {} to {} steps",
    "Over the target: {}.",
    "{}; {}",
    "yours {} steps {} numbers",
    "target {} steps {} numbers",
    "author {} steps {} numbers",
    "ours {} steps {} numbers",
    "The target is reached.",
    "steps {}, target {}",
    "numbers {}, target {}",
    "puzzle {}, {}: yours",
    "standard training",
    "gradient accumulation",
    "distributed data parallel",
    "weight-sharded data parallel",
    "fully sharded data parallel",
    "pipeline",
    "pipeline + FSDP",
    "makespan",
    "peak",
    "score",
    "{} steps, memory {}",
    "time, steps",
    "rank {} waits in {} for rank {}",
    "rank {} waits in {}",
    "weights of layer {} are loaded after the start",
    "input {} is fetched twice",
    "input {}: batches end before",
    "{} lacks its whole weight",
    "forward of layer {} got the input of {}",
    "the loss reads layer {}, not the last",
    "{} got {} and {}",
    "{}: input and gradient of different batches",
    "gradients {} and {} are not of the same shard",
    "{}[{}] exists",
    "{} got gradient {}, weight {}",
    "{} lacks the gradients of batches {}",
    "{}: shards do not match",
    "{}: weight at step {}, state at {}",
    "reduce-scatter of a shard",
    "forward of layer {}",
    "backward of layer {}",
    "update of layer {}",
    "{}: line {}",
    "{} steps",
    "{} numbers",
)
"""Of `shoal.teach.browser.run_puzzle_code`, and of the rules that a program breaks."""
ANSWERS = (*PLANS, *LIMITS, *PUZZLES)
