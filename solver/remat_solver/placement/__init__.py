"""Where copies to the host and back have their place in a plan: of a graph's values, and of what a chain stores."""

from .choose import chosen_gaps, placed, pruned
from .place import Gap, Placed, Timetable, place, room_left, timetable
from .stored import INPUT, moved_plan, stored_graph

__all__ = [
    "INPUT",
    "Gap",
    "Placed",
    "Timetable",
    "chosen_gaps",
    "moved_plan",
    "place",
    "placed",
    "pruned",
    "room_left",
    "stored_graph",
    "timetable",
]
