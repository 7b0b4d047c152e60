"""The cache: what is decoded once, what has the same number, what goes, and what the engine is told of it."""

import asyncio

import msgspec
import pytest
from umbel.lang.errors import EngineError, OverloadedError, ParameterError, RequestError, UmbelError
from umbel.lang.prompt import Media
from umbel.srt.core.config import PictureLimits
from umbel.srt.core.messages import EngineForget, EnginePicture
from umbel.srt.multimodal.cache import InlineDigests, Picture, PictureCache, ThreadedDigests
from umbel.srt.multimodal.decode import InlineDecoder, PictureDecoder

from .patient_decoder import PatientDecoder
from .samples import FORM, media, noise, saved

RASTER = 16 * 16 * 3  # bytes
Told = tuple[Picture, ...] | UmbelError


def cache(decoder: PictureDecoder | None = None, **limits: int) -> PictureCache:
    return PictureCache(FORM, decoder or InlineDecoder(), InlineDigests(), PictureLimits(**limits))


def shown(index: int) -> Media:
    return media(saved(noise(20, 20, index)))


def find(on: PictureCache, what: Media, salt: str = "") -> Picture:
    told: list[Told] = []
    on.find(what, salt, told.append)
    (found,) = told
    assert not isinstance(found, UmbelError), found
    return found[0]


def failure(on: PictureCache, what: Media) -> UmbelError:
    told: list[Told] = []
    on.find(what, "", told.append)
    assert isinstance(told[0], UmbelError)
    return told[0]


def upload(on: PictureCache, *pictures: Picture) -> list[EnginePicture]:
    sent: list[EnginePicture | EngineForget] = []
    on.upload(pictures, sent.append)
    return [message for message in sent if isinstance(message, EnginePicture)]


def forgotten(on: PictureCache) -> list[int]:
    sent: list[EngineForget] = []
    on.send_forgotten(sent.append)
    return [message.number for message in sent]


def test_equal_bytes_are_decoded_once_and_equal_pixels_have_one_number() -> None:
    decoder = PatientDecoder()
    on = cache(decoder)
    told: list[Told] = []
    image = noise(20, 20)
    for data in (saved(image), saved(image), saved(image, "BMP")):
        on.find(media(data), "", told.append)
    decoder.work()
    on.find(media(saved(image)), "", told.append)
    assert len(decoder.asked) == 2
    assert len({found[0].number for found in told if not isinstance(found, UmbelError)}) == 1
    assert on.counters["picture_hits"] == 2
    assert on.counters["pictures_decoded"] == 2


def test_the_engine_is_told_a_digest_of_the_pixels_that_is_the_same_in_every_gateway() -> None:
    digests = []
    for indices in ((0,), (1, 0)):
        decoder = PatientDecoder()
        on = cache(decoder)
        told: list[Told] = []
        for index in indices:
            on.find(shown(index), "", told.append)
        decoder.work()
        digests.append([message.digest for message in upload(on, *(found[0] for found in told if found))])
    assert digests[0][0] == digests[1][1] != digests[1][0]
    assert len(digests[0][0]) == 32


def test_salts_share_nothing() -> None:
    decoder = PatientDecoder()
    on = cache(decoder)
    told: list[Told] = []
    for salt in ("", "a", "b"):
        on.find(shown(0), salt, told.append)
    decoder.work()
    assert len(decoder.asked) == 3
    assert len({found[0].number for found in told if not isinstance(found, UmbelError)}) == 3


def test_a_digest_that_is_not_that_of_the_bytes_is_refused() -> None:
    on = cache()
    find(on, shown(0))
    forged = msgspec.structs.replace(shown(1), digest=shown(0).digest)
    error = failure(on, forged)
    assert isinstance(error, ParameterError)
    assert "send the SHA-256 of the bytes" in str(error)


def test_refusals_are_remembered_and_troubles_are_not() -> None:
    decoder = PatientDecoder()
    on = cache(decoder)
    told: list[Told] = []
    for _ in range(2):
        on.find(media(b"no picture"), "", told.append)
        decoder.work()
    assert len(decoder.asked) == 1
    assert [type(each) for each in told] == [ParameterError, ParameterError]
    decoder.answers.append(RequestError("killed"))
    on.find(shown(1), "", told.append)
    decoder.work()
    on.find(shown(1), "", told.append)
    decoder.work()
    assert isinstance(told[2], RequestError)
    assert isinstance(told[3], tuple)


def test_nobody_waiting_means_no_work() -> None:
    decoder = PatientDecoder()
    on = cache(decoder)
    on.find(shown(0), "", pytest.fail).forget()
    decoder.work()
    assert decoder.asked == []
    told: list[Told] = []
    on.find(shown(0), "", told.append)
    decoder.work()
    assert len(told) == 1


def test_what_waits_is_bounded() -> None:
    decoder = PatientDecoder()
    size = len(shown(0).data)
    on = cache(decoder, waiting_bytes=2 * size + 8)
    for index in (0, 1, 1):
        on.find(shown(index), "", lambda told: None)
    assert isinstance(failure(on, shown(2)), OverloadedError)
    decoder.work()
    on.find(shown(2), "", pytest.fail).forget()


def test_large_media_are_identified_beside_the_loop() -> None:
    told: list[Told] = []
    flushed: list[None] = []

    async def run() -> None:
        on = PictureCache(FORM, InlineDecoder(), ThreadedDigests(lambda: flushed.append(None)), PictureLimits())
        large = media(saved(noise(500, 500)))
        on.find(large, "", told.append)
        on.find(large, "", pytest.fail).forget()
        assert told == []
        on.find(shown(0), "", told.append)
        assert len(told) == 1  # small ones do not wait
        while len(flushed) < 2:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [isinstance(each, tuple) for each in told] == [True, True]


# ------------------------------------------------------------------------------------------ the engine


def test_the_engine_gets_a_picture_once() -> None:
    on = cache()
    picture = find(on, shown(0))
    (message,) = upload(on, picture, picture)
    assert (message.number, message.tokens, message.width, len(message.pixels)) == (picture.number, 4, 20, RASTER)
    assert upload(on, picture) == []


def test_a_message_that_could_not_be_sent_leaves_the_picture_to_be_sent() -> None:
    on = cache()
    picture = find(on, shown(0))

    def fail(message: EnginePicture | EngineForget) -> None:
        raise OSError("no socket")

    with pytest.raises(OSError, match="no socket"):
        on.upload([picture], fail)
    assert len(upload(on, picture)) == 1


def test_an_engine_that_failed_a_request_gets_its_pictures_again() -> None:
    on = cache()
    picture = find(on, shown(0))
    upload(on, picture)
    on.doubt([picture])
    assert len(upload(on, picture)) == 1
    assert upload(on, picture) == []


def test_another_engine_gets_everything_again() -> None:
    on = cache()
    picture = find(on, shown(0))
    upload(on, picture)
    on.engine_lost()
    assert find(on, shown(0)) is picture
    assert len(upload(on, picture)) == 1


def test_the_least_recently_used_falls_off_and_is_forgotten_at_the_engine() -> None:
    on = cache(cache_bytes=2 * RASTER)
    first, second = find(on, shown(0)), find(on, shown(1))
    upload(on, first, second)
    find(on, shown(0))  # used again
    find(on, shown(2))
    assert forgotten(on) == [second.number]
    assert forgotten(on) == []
    assert find(on, shown(0)) is first


def test_a_picture_that_comes_back_has_its_number() -> None:
    on = cache(cache_bytes=RASTER)
    first = find(on, shown(0))
    find(on, shown(1))
    again = find(on, shown(0))
    assert again is not first
    assert again.number == first.number
    assert len(upload(on, again)) == 1


def test_a_picture_that_comes_back_is_not_forgotten_behind_it() -> None:
    on = cache(cache_bytes=RASTER)
    first = find(on, shown(0))
    upload(on, first)
    find(on, shown(1))
    sent: list[EnginePicture | EngineForget] = []
    on.upload([find(on, shown(0))], sent.append)
    assert [type(message) for message in sent] == [EngineForget, EnginePicture]
    assert {message.number for message in sent} == {first.number}


def test_numbers_that_were_dropped_are_not_given_to_others() -> None:
    on = cache(cache_bytes=RASTER, cache_numbers=2)
    numbers = [find(on, shown(index % 5)).number for index in range(10)]
    assert numbers == list(range(10))


def test_a_picture_that_is_held_stays_at_the_engine_until_it_is_let_go() -> None:
    on = cache(cache_bytes=RASTER)
    held = find(on, shown(0))
    on.hold([held])
    upload(on, held)
    find(on, shown(1))
    assert held.raster is None
    assert forgotten(on) == []
    assert find(on, shown(0)) is held  # it is still there
    on.release([held])
    assert forgotten(on) == [held.number]


def test_a_picture_that_the_engine_has_not_got_stays_here_while_it_is_held() -> None:
    on = cache(cache_bytes=RASTER)
    held = find(on, shown(0))
    on.hold([held])
    find(on, shown(1))
    assert held.raster is not None
    on.release([held])
    assert on._bytes <= RASTER
    assert forgotten(on) == []


def test_a_picture_is_there_for_all_who_wait_whatever_the_first_of_them_does() -> None:
    decoder = PatientDecoder()
    on = cache(decoder, cache_bytes=0)
    kept: list[Picture] = []

    def fail(found: Told) -> None:
        assert isinstance(found, tuple)
        on.hold(found)
        on.release(found)

    def keep(found: Told) -> None:
        assert isinstance(found, tuple)
        on.hold(found)
        kept.extend(found)

    on.find(shown(0), "", fail)
    on.find(shown(0), "", keep)
    decoder.work()
    assert [picture.number for picture in upload(on, *kept)] == [kept[0].number]
    on.release(kept)
    assert forgotten(on) == [kept[0].number]


def test_a_picture_that_died_with_its_engine_is_said_to_have() -> None:
    on = cache(cache_bytes=RASTER)
    held = find(on, shown(0))
    on.hold([held])
    upload(on, held)
    find(on, shown(1))
    on.engine_lost()
    with pytest.raises(EngineError, match="run it again"):
        upload(on, held)
    again = find(on, shown(0))
    assert again.number == held.number
    upload(on, again)
    on.release([held])  # which is not the one that is there now
    assert forgotten(on) in ([], [find(on, shown(1)).number])
    assert find(on, shown(0)).number == held.number


def test_what_requests_hold_is_bounded() -> None:
    on = cache(held_bytes=2 * RASTER)
    pictures = [find(on, shown(index)) for index in range(2)]
    on.hold(pictures)
    on.hold(pictures)
    assert isinstance(failure(on, shown(2)), OverloadedError)
    assert find(on, shown(1)) is pictures[1]
    on.release(pictures)
    on.release(pictures)
    find(on, shown(2))


def test_what_is_known_of_files_is_bounded() -> None:
    decoder = PatientDecoder()
    on = cache(decoder, cache_sources=2)
    for index in (0, 1, 2, 0):
        on.find(shown(index), "", lambda told: None)
        decoder.work()
    assert len(decoder.asked) == 4
