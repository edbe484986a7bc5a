"""Scripts of other libraries lie here: they are run as programs, never imported."""

collect_ignore_glob = [
    "*_script.py",
    "accelerate_case.py",
    "engine_case.py",
    "printed_*.py",
    "beside_*.py",
    "stand_ins/*",
    "flower_app/*",
]
