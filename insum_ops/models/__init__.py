"""What is done to whole models, whatever layers they hold.

swap_losses  what would be lost where one layer takes another's place
"""
