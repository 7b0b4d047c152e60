"""Questions about one document: its KV is computed once, so the second answer comes several times faster."""

import time

import umbel as ul

HEADER = "ID|Name|Age|Occupation|Country|Email|Phone Number|Address"
ROWS = """\
John Doe|29|Engineer|USA|john.doe@example.com|555-1234|123 Elm St, Springfield, IL
Jane Smith|34|Doctor|Canada|jane.smith@example.com|555-5678|456 Oak St, Toronto, ON
Alice Johnson|27|Teacher|UK|alice.j@example.com|555-8765|789 Pine St, London, UK
Bob Brown|45|Artist|Australia|bob.b@example.com|555-4321|321 Maple St, Sydney, NSW
Carol White|31|Scientist|New Zealand|carol.w@example.com|555-6789|654 Birch St, Wellington, NZ
Dave Green|28|Lawyer|Ireland|dave.g@example.com|555-3456|987 Cedar St, Dublin, IE
Emma Black|40|Musician|USA|emma.b@example.com|555-1111|246 Ash St, New York, NY
Frank Blue|37|Chef|Canada|frank.b@example.com|555-2222|135 Spruce St, Vancouver, BC
Grace Yellow|50|Engineer|UK|grace.y@example.com|555-3333|864 Fir St, Manchester, UK
Henry Violet|32|Artist|Australia|henry.v@example.com|555-4444|753 Willow St, Melbourne, VIC
Irene Orange|26|Scientist|New Zealand|irene.o@example.com|555-5555|912 Poplar St, Auckland, NZ
Jack Indigo|38|Teacher|Ireland|jack.i@example.com|555-6666|159 Elm St, Cork, IE
Karen Red|41|Lawyer|USA|karen.r@example.com|555-7777|357 Cedar St, Boston, MA
Leo Brown|30|Chef|Canada|leo.b@example.com|555-8888|246 Oak St, Calgary, AB
Mia Green|33|Musician|UK|mia.g@example.com|555-9999|975 Pine St, Edinburgh, UK
Noah Yellow|29|Doctor|Australia|noah.y@example.com|555-0000|864 Birch St, Brisbane, QLD
Olivia Blue|35|Engineer|New Zealand|olivia.b@example.com|555-1212|753 Maple St, Hamilton, NZ
Peter Black|42|Artist|Ireland|peter.b@example.com|555-3434|912 Fir St, Limerick, IE
Quinn White|28|Scientist|USA|quinn.w@example.com|555-5656|159 Willow St, Seattle, WA
Rachel Red|31|Teacher|Canada|rachel.r@example.com|555-7878|357 Poplar St, Ottawa, ON
Steve Green|44|Lawyer|UK|steve.g@example.com|555-9090|753 Elm St, Birmingham, UK
Tina Blue|36|Musician|Australia|tina.b@example.com|555-1213|864 Cedar St, Perth, WA
Umar Black|39|Chef|New Zealand|umar.b@example.com|555-3435|975 Spruce St, Christchurch, NZ
Victor Yellow|43|Engineer|Ireland|victor.y@example.com|555-5657|246 Willow St, Galway, IE
Wendy Orange|27|Artist|USA|wendy.o@example.com|555-7879|135 Elm St, Denver, CO
Xavier Green|34|Scientist|Canada|xavier.g@example.com|555-9091|357 Oak St, Montreal, QC
Yara Red|41|Teacher|UK|yara.r@example.com|555-1214|975 Pine St, Leeds, UK
Zack Blue|30|Lawyer|Australia|zack.b@example.com|555-3436|135 Birch St, Adelaide, SA
Amy White|33|Musician|New Zealand|amy.w@example.com|555-5658|159 Maple St, Wellington, NZ
Ben Black|38|Chef|Ireland|ben.b@example.com|555-7870|246 Fir St, Waterford, IE"""
TABLE = "\n".join([HEADER, *(f"{number}|{row}" for number, row in enumerate(ROWS.splitlines(), 1))])


@ul.function
def ask(s, name):
    s += "You help to read tables. Here is one, with its columns separated by bars.\n\n" + TABLE + "\n\n"
    s += "Question: what is the age of Emma Black? Answer: The age of Emma Black is 40.\n"
    s += f"Question: what is the age of {name}? Answer: The age of {name} is"
    s += ul.gen("age", max_tokens=8, stop=[".", "\n"], temperature=0)


def main() -> None:
    ul.get_server_info()  # the model is loaded, which is no part of the first answer
    for name in ("John Doe", "Zack Blue"):
        start = time.perf_counter()
        state = ask.run(name=name)
        age = state["age"].strip()
        seconds = time.perf_counter() - start
        meta = state.get_meta_info("age")
        print(
            f"{name} is {age}: {seconds:.3f} s, "
            f"{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens from the cache"
        )


if __name__ == "__main__":
    main()
