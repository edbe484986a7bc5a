"""Proof that a layout computes the same as one process: the battery of our tests and `shoal prove`.

trial      the user's model, data and loss, trained for a few steps
           trial_side.py, proof_case.py
record     losses, norms, whole gradients of every step, final weights; a layout's is compared
           step by step: trajectory_record.py, recording.py, tensor_spill.py
blocks     for models that are too large: one block of each kind and the ends: reduced_model.py
reference  the same trial in one process (the twin), on the same micro-batches: battery.py
verdict    the two records, compared by the definition of design §6, tensor by tensor
           equality_bounds.py, verdict.py, distances.py
cause      the first difference, its size, its likely cause and remedy: diagnosis/
start      two small steps before a training run on several processes: start_proof.py
"""

from __future__ import annotations

from shoal.proof.battery import Battery as Battery
from shoal.proof.proof_case import ProofCase as ProofCase
from shoal.proof.start_proof import prove_layout as prove_layout
from shoal.proof.trial_side import Trial as Trial
from shoal.proof.trial_side import TrialSide as TrialSide
