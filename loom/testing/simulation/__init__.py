"""The simulation: a fleet of nodes under one clock and one source of chance, with faults (docs/simulation.md)."""

from loom.testing.simulation.faults import FAULTS
from loom.testing.simulation.run import DEFAULT_STEPS, Report, simulate
from loom.testing.simulation.world import SimulationError

__all__ = ["DEFAULT_STEPS", "FAULTS", "Report", "SimulationError", "simulate"]
