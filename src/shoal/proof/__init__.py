"""Does a layout compute what one process computes? The battery that tests and `shoal prove` share.

trial      the user's model, data and loss, trained for a few steps          side.py, proof_case.py
record     losses, norms, whole gradients of every step, final weights       trajectory_record.py
           filled, and a layout's compared as it goes                        recording.py, shelf.py
blocks     what is too large: one block of each kind and the ends            by_blocks.py
twin       the same trial in one process, on the same list of micro-batches  battery.py
verdict    the two records, compared by the definition of design §6          bounds.py, verdict.py
           tensor by tensor, as they come                                    distances.py
cause      where and how much it differs first, why, and what a user can do
                                                         causes.py, gradient_clue.py, norms.py
quick      two small steps before a training run on several processes        quick.py
"""

from __future__ import annotations

from shoal.proof.battery import Battery as Battery
from shoal.proof.proof_case import ProofCase as ProofCase
from shoal.proof.quick import prove_before as prove_before
from shoal.proof.side import Side as Side
from shoal.proof.side import Trial as Trial
