"""The life of one dataflow. What others use."""

from actors.dataflow.dataflow import Dataflow as Dataflow
