"""Critics at their owners, over Flower: the generator here, each client's data at the client.

Needs the extra `federated`. What touches records is `understudy.privacy.client`; here is the way
there and back.
"""
