"""The simulation: a fleet of nodes under one clock and one source of chance, with faults (docs/simulation.md)."""

import logging

from loom.testing.simulation.faults import FAULTS
from loom.testing.simulation.many import Tally, simulate_many
from loom.testing.simulation.run import DEFAULT_STEPS, Report, simulate
from loom.testing.simulation.world import SimulationError

__all__ = ["DEFAULT_STEPS", "FAULTS", "Report", "SimulationError", "Tally", "simulate", "simulate_many"]

logging.getLogger("loom").addHandler(logging.NullHandler())  # what nodes complain of is expected here
