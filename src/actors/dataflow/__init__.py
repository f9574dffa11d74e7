"""Moves one dataflow forward; `Dataflow`, its actor, is what other packages use."""

from actors.dataflow.dataflow import Dataflow as Dataflow
