"""The ways into the package from outside. Nothing imports a door.

cli/            the command line
integrations/   the training loops of other frameworks
interchange/    the config files of other tools
"""
