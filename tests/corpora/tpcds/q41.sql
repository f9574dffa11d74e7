-- Products of makers who have certain items: a correlated count compared with zero.
select distinct i_product_name
from item as i1
where i_manufact_id between 738 and 738 + 40
  and (
    select count(*)
    from item
    where i_manufact = i1.i_manufact
      and (
        (i_category = 'Women' and (
          (i_color in ('powder', 'khaki') and i_units in ('Ounce', 'Oz')
            and i_size in ('medium', 'extra large'))
          or (i_color in ('brown', 'honeydew') and i_units in ('Bunch', 'Ton')
            and i_size in ('N/A', 'small'))
          or (i_color in ('midnight', 'snow') and i_units in ('Pallet', 'Gross')
            and i_size in ('medium', 'extra large'))
          or (i_color in ('cyan', 'papaya') and i_units in ('Cup', 'Dram')
            and i_size in ('N/A', 'small'))
        ))
        or (i_category = 'Men' and (
          (i_color in ('floral', 'deep') and i_units in ('N/A', 'Dozen')
            and i_size in ('petite', 'large'))
          or (i_color in ('light', 'cornflower') and i_units in ('Box', 'Pound')
            and i_size in ('medium', 'extra large'))
          or (i_color in ('orange', 'frosted') and i_units in ('Each', 'Tbl')
            and i_size in ('petite', 'large'))
          or (i_color in ('forest', 'ghost') and i_units in ('Lb', 'Bundle')
            and i_size in ('medium', 'extra large'))
        ))
      )
  ) > 0
order by i_product_name
limit 100
