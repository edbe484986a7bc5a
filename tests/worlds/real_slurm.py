"""A Slurm of its own in a folder: a controller and nodes on this machine, which end with it.

No accounting, no cgroups, no munge: whoever reaches its ports may use it, so it listens only as long
as a test lasts. Needs root and Debian's slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")


class Missing(Exception):
    """Slurm is not installed here, or does not start."""


class Slurm:
    """A controller and `nodes` nodes named n1, n2, … with `cpus` cores each."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 2) -> None:
        away = [name for name in PROGRAMS if shutil.which(name) is None]
        if away or os.geteuid():
            raise Missing(f"{away[0]} is not installed" if away else "it needs root")
        self.folder, self.daemons = folder, []
        ports = _free_ports(nodes + 1)
        for name in ("state", *(f"spool-n{node + 1}" for node in range(nodes))):
            (folder / name).mkdir()
        host = socket.gethostname()
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "AuthType=auth/none",
            "CredType=cred/none",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SchedulerType=sched/backfill",
            "SchedulerParameters=sched_interval=1,batch_sched_delay=1",
            "MpiDefault=none",
            "ReturnToService=2",
            "SlurmdParameters=config_overrides",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool-%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            "MessageTimeout=30",
            "KillWait=10",
            *(
                f"NodeName=n{node + 1} NodeHostname={host} NodeAddr=127.0.0.1 "
                f"Port={ports[node + 1]} CPUs={cpus} RealMemory=1000"
                for node in range(nodes)
            ),
            f"PartitionName=all Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE OverSubscribe=NO",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemon("slurmctld", "-D", "-i")
        for node in range(nodes):
            self._daemon("slurmd", "-D", "-N", f"n{node + 1}")
        self._await(nodes)

    def ask(self, *command: str) -> str:
        """What one of Slurm's programs prints. Errors: CalledProcessError."""
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True,
            timeout=300, check=True,
        )  # fmt: skip
        return done.stdout

    def said(self) -> str:
        """What the daemons printed last."""
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.daemon"))

    def close(self) -> None:
        """End jobs and daemons."""
        subprocess.run(
            ["scancel", "--state=RUNNING"], env=self.environment, check=False, timeout=300
        )
        until_s = time.monotonic() + 20
        while self.ask("squeue", "-h", "-t", "RUNNING,COMPLETING") and time.monotonic() < until_s:
            time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{'-'.join(command)}.daemon").open("wb") as log:
            self.daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            )

    def _await(self, nodes: int) -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            time.sleep(0.5)
            try:
                if self.ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").count("n") == nodes:
                    return
            except subprocess.SubprocessError:
                continue
        said = self.said()
        self.close()
        raise Missing(f"its daemons do not answer: {said}")


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
