"""Does a layout compute what one process computes? The battery that tests and `shoal prove` share.

trial      the user's model, data and loss, trained for a few steps
           trial_side.py, proof_case.py
record     losses, norms, whole gradients of every step, final weights; a layout's is compared
           as it goes: trajectory_record.py, recording.py, tensor_spill.py
blocks     what is too large: one block of each kind and the ends: reduced_model.py
twin       the same trial in one process, on the same list of micro-batches: battery.py
verdict    the two records, compared by the definition of design §6, tensor by tensor
           equality_bounds.py, verdict.py, distances.py
cause      where and how much it differs first, why, and what a user can do: diagnosis/
start      two small steps before a training run on several processes: start_proof.py
"""

from __future__ import annotations

from shoal.proof.battery import Battery as Battery
from shoal.proof.proof_case import ProofCase as ProofCase
from shoal.proof.start_proof import prove_before as prove_before
from shoal.proof.trial_side import Side as Side
from shoal.proof.trial_side import Trial as Trial
