"""The ground everything stands on: the settings of a run and the errors a user can fix."""
