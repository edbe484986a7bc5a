"""Texts of the planner's and the puzzles' answers in a page, in English, with holes for their parts.

`answers.po` has their translations, and `WordTranslation` fills them: `{}` stands for words that
are translated in their turn, `{=}` for words that stay as they are, `#` for figures. A figure that
a user typed may be of any form, so its hole is `{=}`. An answer that none of them fits stays
English; a test asks for every answer and finds English words. The first one that fits is taken, so
a whole line stands before its parts.
"""

GUIDE = "the field's guide ({}) says {}"
ON = '--on "{=}": '
PLANS = (
    "#. {}: {} per step, {}, {}",
    f"{GUIDE}: the same",
    f"{GUIDE}, which is not legal here ({{}})",
    f"{GUIDE}: lacks {{}}, so overruled",
    f"{GUIDE}: {{}}, but its memory is tight, so overruled",
    f"{GUIDE}: {{}}, but estimated {{}} over, so overruled",
    f"{GUIDE}: as fast, {{}}",
    f"{GUIDE}: {{}} slower ({{}}), so overruled",
    "try: {}: {}",
    "{}, micro-batch #, {}",
    "{}, micro-batch #",
    "recompute {=}, {}",
    "recompute {=}",
    "offload {=} to files, {}",
    "offload {=} to files",
    "offload {=}, {}",
    "offload {=}",
    "reshard {=}",
    "fits",
    "tight",
    "no",
    "below {=}: {=}",
    "above {=}: {=}",
    "#–#B: {=}",
    "{=} = {=}: nothing divides it over # devices; try: {=}",
    "{=} = {=}: must be more than 0; try: {=}",
)
"""Of `shoal.teach.browser.plan_model`."""
MACHINES = (
    f'{ON}"{{=}}" is no device of the catalogue ({{=}}); try: a file of its figures, as in {{=}}',
    f'{ON}"{{=}}" is no device of the catalogue ({{=}}); try: {{=}}, or a file of its figures, '
    "as in {=}",
    f"{ON}{{}}, then expected {{}}, got {{}}; example: --on {{=}}",
    'read "{=}" (to character #)',
    "at its start",
    "the end",
    '"+", ",key=value" or the end',
    '")" or "+"',
    "counts of at least # before it",
    'a device such as "{=}", or "{=}"',
    'the rate between islands, such as "{=}" or "{=}"',
    f'{ON}islands are equal, so "+" stands inside their brackets; try: --on {{=}}',
    f"{ON}islands hold no islands; example: {{=}}",
    f"{ON}{{=}}= is no option of a machine, which are inside, ib, roce, eth; example: --on {{=}}",
    f"{ON}{{=}}= is no option of the link between islands; try: {{=}}",
    f"{ON}{{=}} is no time; try: {{=}}",
    f"{ON}{{=}} is no number of network cards per node and their rate in bits per second; "
    "try: {=}",
    f"{ON}# {{=}} are no whole nodes of #; try: {{=}}, or {{=}} for one node",
    "--on {=}: cannot be read ({}); a device file has {=}",
    "No such file or directory",
    "{=} = {=}: not one of {=}; try: {=}",
    "{=} = {=}: not one of {=}",
)
"""Of machines that `shoal.forecast.machines` cannot parse."""
LIMITS = (
    "layout.schedule = {=}: needs an even number of ranks and an even number of micro-batches, "
    "at least two per rank, got layout.pp = {=} and {=}; try: layout.pp={=} and {=}",
    "layout.schedule = {=}: needs micro-batches per step in a multiple of layout.pp = {=}, "
    "got {=}; try: {=}, or layout.schedule={=}",
    "layout.schedule = {=}: needs at least # rank, # micro-batch and # chunk, got {=}, {=}, {=}",
    "--ranks × --micro-batches = {=} × {=}: too much to draw; try: {=}",
    "--ranks = {=}: DiLoCo is shown with # to # ranks; try: {=}",
    "--ranks = {=}: {} is shown with # to # ranks; try: {=}",
    "--ranks = {=}: experts are shown on # to # ranks; try: {=}",
    "tensor parallelism",
    "expert parallelism",
    "ring attention",
    ": ",
)
"""Of drawings that a schedule or a walk refuses, and between the name of a fact and its figure."""
DRAWN_PUZZLES = (
    "ranks {=}: {}, from # to # steps",
    "rank {=}: {}, from # to # steps",
    "ranks #",
    "ranks # … #",
    "forward #",
    "backward #",
    "update #",
    "send to #",
    "receive from #",
    "to #",
    "from #",
    "send",
    "receive",
    "puzzle #, {}: yours",
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
    "# steps, memory #",
    "# steps",
    "# numbers",
    "time, steps",
)
"""Of the drawing of a program."""
PUZZLES = (
    "your program: it has no async def program(m); try: the first example of shoal docs puzzles",
    "your program: line #: {=}",
    "your program: {=}",
    "yours {=} steps {=} numbers",
    "target {=} steps {=} numbers",
    "author {=} steps {=} numbers",
    "ours {=} steps {=} numbers",
    "Over the target: {}.",
    "The target is reached.",
    "steps #, target #",
    "numbers #, target #",
    "{}; {}",
)
"""Of `shoal.teach.browser.run_puzzle_code`: the user's own errors, and scores."""
RULES = (
    "puzzle: deadlock: {}",
    "puzzle: ranks meet in different collectives: {}",
    "puzzle: layer # ends without its whole weight at step #",
    "puzzle: rank # holds no {=}",
    "puzzle: rank # waits for rank #, its mailbox holds a message of rank #",
    "puzzle: rank # was woken without an answer to {=}",
    "puzzle: rank #: {}",
    "rank # waits in {=} for rank #",
    "rank # waits in {=}",
    "weights of layer {=} are loaded after the start",
    "input {=} is fetched twice",
    "input {=}: batches end before",
    "{} lacks its whole weight",
    "forward of layer {=} got the input of {=}",
    "the loss reads layer {=}, not the last",
    "{} got gradient {=}, weight {=}",
    "{} got {=} and {=}",
    "{}: input and gradient of different batches",
    "gradients {=} and {=} are not of the same shard",
    "{=}[{=}] exists",
    "{} lacks the gradients of batches {=}",
    "{}: shards do not match",
    "{}: weight at step #, state at #",
    "reduce-scatter of a shard",
    "forward of layer {=}",
    "backward of layer {=}",
    "update of layer {=}",
    "{=} of layer {=}, {}",
    "{=} of layer {=}",
)
"""Of the rules that a program breaks."""
ANSWERS = (*PLANS, *MACHINES, *LIMITS, *DRAWN_PUZZLES, *PUZZLES, *RULES)
